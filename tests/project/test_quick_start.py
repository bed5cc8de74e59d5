from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvcached.doctor import sglang_flags, vllm_flags
from kvcached_client.sglang.settings import EXTRA_CONFIG
from tests.project.documented_commands import in_blocks
from tests.project.quick_start import PAGE, daemon_of, section, shown, walk
from tests.project.source_tree import ROOT

#: Commands and lines of a program, together.
LINES_MAX = 10
SECTIONS = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)


@pytest.mark.full
@pytest.mark.timeout(240)
def test_daemon_of_the_quick_start_serves_its_engine(tmp_path: Path) -> None:
    """The first section's commands work, and the second's print what it shows: a hit in the second process."""
    walk("A daemon on the CPU", tmp_path)
    with daemon_of("A daemon on the CPU", tmp_path):
        assert walk("Your own engine", tmp_path) == shown("Your own engine")


@pytest.mark.parametrize("title", SECTIONS)
def test_each_quick_start_is_ten_lines(title: str) -> None:
    """A section has ten lines of commands at most, and its program has ten at most."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", section(title), re.DOTALL)
    for language in ("", "python"):
        lines = [line for name, block in blocks if name == language for line in block.splitlines() if line]
        assert len(lines) <= LINES_MAX, (title, language)


@pytest.mark.parametrize("document", ["README.md", "docs/quick-start.md", "docs/engines.md"])
def test_vllm_is_started_as_the_connector_wants_it(document: str) -> None:
    """The documents' command has the transfer configuration that doctor asks for, and nothing that it objects to."""
    (words,) = [
        each for each in in_blocks((ROOT / document).read_text()) if "vllm.entrypoints.openai.api_server" in each
    ]
    arguments = words[3:]

    assert json.loads(arguments[-1]) == vllm_flags.TRANSFER_CONFIG
    found = vllm_flags.check_flags(vllm_flags.parse(arguments), {}, Path("/run/kvcached"))
    assert [each for each in found if each.level == "fail"] == []


@pytest.mark.parametrize("document", ["README.md", "docs/quick-start.md", "docs/sglang.md"])
def test_sglang_is_started_as_the_storage_wants_it(document: str) -> None:
    """The documents' command has the extra configuration that doctor asks for, and nothing that it objects to."""
    (words,) = [each for each in in_blocks((ROOT / document).read_text()) if "sglang.launch_server" in each]
    arguments = words[3:]

    assert json.loads(arguments[-1]) == EXTRA_CONFIG
    found = sglang_flags.check_flags(sglang_flags.parse(arguments), Path("/run/kvcached"))
    assert [each for each in found if each.level != "ok"] == []
