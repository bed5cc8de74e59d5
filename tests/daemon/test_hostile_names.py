"""Names that an engine chooses to drive the terminal of an operator, or to forge a line there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvcached.cli.main import main
from kvcached_client import Admin
from kvcached_client.offload import Hold
from tests.daemon.conftest import CONFIG, RunningDaemon, started
from tests.daemon.offload_process import BLOCK_SIZE, keys_of
from tests.daemon.test_offload import config as offload_config
from tests.faults.engine import OFFLOAD_BLOCKS, OffloadEngine

#: The title of a terminal, a colour, a line of its own, and one over the line that is there.
HOSTILE = "ev\x1b]0;title\x07\x1b[31mil\nkvcached: forged\rkvcached: forged"
KEYS = keys_of("held", 2)
KEY = KEYS[-16:].hex()
VLLM = ["--tokens", "-", "--engine", "vllm", "--block-size", "4"]


class HostileEngine(OffloadEngine):
    """An engine whose label, requests and tenants are hostile, with blocks in the host pool and a lease."""

    label = HOSTILE

    def hold(self) -> Hold:
        self.scheduler.tenant = HOSTILE
        self.store("held")
        client = self.scheduler.client
        return client.acquire(HOSTILE, keys_of("held", OFFLOAD_BLOCKS), OFFLOAD_BLOCKS * BLOCK_SIZE, full=True)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    """A daemon with a hostile engine in offload mode, beside a replica."""
    config = (
        f'{offload_config()}[[host.quota.tenant]]\nlabel = "*"\ncap_percent = 50\n{CONFIG.split("ttl_ms = 600")[1]}'
    )
    with started(tmp_path, config) as running, closing(HostileEngine(running.run_dir)) as engine:
        engine.hold()
        yield running


def namespace(daemon: RunningDaemon) -> str:
    with Admin.connect(daemon.run_dir) as admin:
        (host,) = [host for host in admin.stats().hosts if host.label]
    return host.namespace


COMMANDS = [
    *(["stats"], ["describe"], ["health"], ["check"], ["tree"], ["what-if"], ["storage"]),
    *(
        ["inspect", KEY],
        ["explain", "--keys", "-"],
        ["explain", *VLLM],
        ["top", "--samples", "1", "--interval-s", "0.1"],
    ),
    *(["clear", "nobody"], ["set-weights", "nobody", "v"], ["set-policy", "nobody", "never"], ["sleep", "nobody"]),
    *(["pin", "nobody", *VLLM], ["unpin", "nobody", *VLLM], ["pin", "nobody", "--keys", "-"]),
    *(["pin", "NAMESPACE", "--tokens", "-"], ["set-weights", "NAMESPACE", "v"], ["sleep", "NAMESPACE"]),
    *(["set-weights", "default", HOSTILE], ["set-policy", "NAMESPACE", "never"], ["clear", "NAMESPACE"]),
]


@pytest.mark.parametrize("json", [[], ["--json"]], ids=["text", "json"])
def test_names_of_engines_drive_no_terminal(daemon: RunningDaemon, json: list[str]) -> None:
    """No command prints a character of control that an engine has put into a name, nor a line that it has forged."""
    told = ""
    for command in COMMANDS:
        there = [namespace(daemon) if word == "NAMESPACE" else word for word in command]
        keys = "\n".join(KEYS[at : at + 16].hex() for at in range(0, len(KEYS), 16))
        said = (
            CliRunner()
            .invoke(
                main,
                [*there, "--run-dir", str(daemon.run_dir), *json],
                input=keys if "--keys" in command else "1 2 3 4 5 6 7 8 9",
                color=True,  # otherwise click takes some of it out
            )
            .output
        )

        assert [character for character in said if not character.isprintable() and character != "\n"] == [], command
        assert "\nkvcached: forged" not in f"\n{said}", command
        told += said
    assert told.count(r"ev\x1b" if not json else r"ev\u001b") >= 5  # they are shown, and not left out
