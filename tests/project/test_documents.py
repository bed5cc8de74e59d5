from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from click.core import Group, Option

from kvcached.cli.main import ExitCode, main
from kvcached.core.messages import TransferKind
from kvcached.core.slots.states import SlotState
from kvcached_client.protocol.engine import HostStats, PoolStats
from tests.project.named_tests import is_test, named
from tests.project.source_tree import ROOT

DOCUMENTS = sorted(
    [*ROOT.glob("*.md")]
    + [path for folder in ("docs", "benchmarks", "examples", "tests") for path in (ROOT / folder).rglob("*.md")]
)
SITE = ROOT / "docs/site"

#: Of ARCHITECTURE.md: what a reader takes in at one go.
LINES_MAX = 200


def tables(path: Path) -> list[list[str]]:
    """Every row of every table: its cells, without ticks."""
    rows = [line.strip().strip("|").split("|") for line in path.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip().replace("`", "") for cell in row] for row in rows]


def without_code(path: Path) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


@cache
def places(path: Path) -> set[str]:
    """The anchors of a document's headings, as code hosts and the site make them."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,4} (.*)$", without_code(path), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        place = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found.append(f"{place}-{count}" if (count := found.count(place)) else place)
    return set(found)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_links_lead_somewhere(document: Path) -> None:
    """Every relative link in a document names a file that exists, and a heading of it; no link is to a folder."""
    dead = []
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", without_code(document)):
        file, _, place = link.partition("#")
        target = document.parent / file if file else document
        if not target.is_file() or (place and place not in places(target)):
            dead.append(link)
    assert dead == []


def test_site_has_every_document() -> None:
    """The navigation of the site names each document once, but decisions, which their own page lists, and no other."""
    named = re.findall(r"^(?:.* <)?([\w/-]+)>?$", (SITE / "navigation.txt").read_text(), re.MULTILINE)
    documents = {str(path.relative_to(ROOT).with_suffix("")) for path in DOCUMENTS}

    assert len(named) == len(set(named))
    assert set(named) == {name for name in documents if not re.match(r"docs/decisions/\d", name)} - {"README"}


def test_architecture_names_every_folder() -> None:
    """ARCHITECTURE.md names every folder of daemon and client, no file that does not exist, and is short."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    folders = {
        f"{path.parent.relative_to(ROOT)}/"
        for folder in ("kvcached", "kvcached_client")
        for path in (ROOT / folder).rglob("*.py")
        if "build" not in path.parts
    }

    assert folders <= set(re.findall(r"`(kvcached[\w/]*/)`", text))
    for name in re.findall(r"`((?:kvcached|kvcached_client)/[\w/]+\.py)`", text):
        assert (ROOT / name).exists(), name
    assert len(text.splitlines()) <= LINES_MAX


def test_cli_document_lists_the_commands() -> None:
    """docs/cli.md lists each command with the help text that the command prints."""
    assert isinstance(main, Group)
    rows = {row[0]: row[1] for row in tables(ROOT / "docs/cli.md") if len(row) == 2}

    for name, command in main.commands.items():
        assert rows[name] == (command.help or "").replace("`", "")


def test_cli_document_lists_the_options() -> None:
    """docs/cli.md lists each option with the commands that take it and the variable that stands for it."""
    rows = {row[0]: row[1:] for row in tables(ROOT / "docs/cli.md") if row[0].startswith("--")}
    options: dict[str, set[str]] = {}
    for name, command in main.commands.items():
        for parameter in (each for each in command.params if isinstance(each, Option)):
            options.setdefault(parameter.opts[0], set()).add(name)

    assert {option: set(row[0].split(", ")) for option, row in rows.items()} == options
    for option, row in rows.items():
        variable = f"KVCACHED_{option[2:].replace('-', '_').upper()}"
        assert row[1] in {variable, ""}
        help_text = main.commands["serve"].get_help(main.make_context("kvcached", ["version"]))
        assert (variable in help_text) == (row[1] == variable and option in options and "serve" in row[0])


def test_cli_document_and_help_agree_on_exit_codes() -> None:
    """Each exit code has the same meaning in docs/cli.md, in the epilog of --help, and in the code."""
    rows = {row[0]: row[1] for row in tables(ROOT / "docs/cli.md") if row[0].isdecimal()}

    assert rows == {str(code.value): code.meaning for code in ExitCode}
    for command in [main, *main.commands.values()]:
        assert all(f"{code.value}  {code.meaning}" in (command.epilog or "") for code in ExitCode)


def test_cli_document_explains_everything_that_stats_print() -> None:
    """docs/cli.md explains each field of a pool and of the host pool, each state, and each counter that is kept."""
    explained = {name for row in tables(ROOT / "docs/cli.md") for name in row[0].split(", ")}
    sources = "".join(path.read_text() for path in (ROOT / "kvcached").rglob("*.py"))
    counters = set(re.findall(r'(?:counters\[|\bcount\()"(\w+)"', sources)) - {"errors_internal"}  # a code
    fields = {*PoolStats.__struct_fields__, *HostStats.__struct_fields__} - {"replica", "states"}
    fields |= {f"{state}_{kind}s" for state in ("queued", "running") for kind in TransferKind}

    assert counters
    assert (counters | fields | {state.name.lower() for state in SlotState}) - explained == set()


def test_changelog_has_a_section_for_what_comes() -> None:
    """CHANGELOG.md has the section that changes go to."""
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


def test_threats_name_tests_that_exist() -> None:
    """SECURITY.md names for each threat a test that exists, or says what is not covered."""
    text = (ROOT / "SECURITY.md").read_text()
    threats = [row for row in tables(ROOT / "SECURITY.md") if re.match(r"A\d+ ", row[0])]

    assert [row[0].split()[0] for row in threats] == [f"A{number}" for number in range(1, 20)]
    assert [row[0] for row in threats if "tests/" not in row[2]] == []
    assert [node for node in named(text) if not is_test(*node)] == []
    assert len(re.findall(r"\btests/", text)) == len(re.findall(r"`tests/[\w/]+\.py::\w+`", text))
