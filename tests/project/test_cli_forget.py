"""`kvcached forget`: from a prompt's tokens to what is left of it, over a service without sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

import kvcached_client
from kvcached.cli.main import ExitCode, main
from kvcached_client import KeyChain
from kvcached_client.protocol import engine as protocol
from kvcached_client.vllm.keys import VllmHashing, block_keys
from tests.project.admins import FakeAdmin, OfficeAdmin
from tests.project.test_cli_pin import BLOCKS, NAMESPACE, TOKENS, attach
from tests.service.office import ONE, FakePeer
from tests.service.offload_office import OffloadOffice


@pytest.fixture
def office(monkeypatch: pytest.MonkeyPatch) -> OffloadOffice:
    """A service with a prompt in replica a, and in its host pool."""
    made = OffloadOffice()
    made.enter(FakePeer(1))
    made.store(native())
    made.workers["a"].end_all()
    monkeypatch.setattr(kvcached_client, "Admin", OfficeAdmin(made))
    return made


def native(*, salt: str = "") -> bytes:
    return KeyChain(NAMESPACE, 4, TOKENS, salt=salt).keys


def run(*arguments: str, stdin: object = TOKENS) -> Result:
    return CliRunner().invoke(main, ["forget", *arguments], input=json.dumps(stdin))


def test_forget_removes_the_prompt_with_these_tokens(office: OffloadOffice) -> None:
    """Another salt is another prompt; the blocks that are to stay do; nothing is left, which the exit code says."""
    other = run("a", "--tokens", "-", "--salt", "s")
    assert (other.exit_code, other.stdout.splitlines()) == (
        ExitCode.OK,
        ["removed: 0 copies on devices, 0 in host memory, 0 blocks in storage"],
    )
    result = run("a", "--tokens", "-", "--from-block", "1")
    assert (result.exit_code, result.stdout.splitlines()) == (
        ExitCode.OK,
        [f"removed: {BLOCKS - 1} copies on devices, {BLOCKS - 1} in host memory, 0 blocks in storage"],
    )
    assert office.cache.counters["forgotten_blocks"] == 2 * (BLOCKS - 1)


def test_forget_of_what_is_in_use_exits_with_1(office: OffloadOffice) -> None:
    """The output says how many blocks stay, and what to do; in JSON they are a number."""
    office.expect(protocol.Acquired, office.acquire(native()), native(), peer=ONE)

    result = run("a", "--tokens", "-")
    assert (result.exit_code, result.stdout.splitlines()[1:]) == (
        ExitCode.UNHEALTHY,
        [f"{BLOCKS} blocks are in use: unpin them, or wait for their requests, and repeat this"],
    )
    said = run("a", "--tokens", "-", "--json")
    assert said.exit_code == ExitCode.UNHEALTHY
    expected: dict[str, Any] = {"device": 0, "host": 0, "stored": 0, "in_use": BLOCKS, "left_in_storage": ""}
    assert json.loads(said.stdout) == expected


def test_forget_for_vllm_takes_its_keys(office: OffloadOffice) -> None:
    """The namespace is named by its label, and the keys are hashed as vLLM does; what an engine stores is in use."""
    attach(office, block_keys(TOKENS, VllmHashing(block_size=4)))

    result = run("tiny", "--engine", "vllm", "--tokens", "-", "--json")
    assert (result.exit_code, json.loads(result.stdout)["in_use"]) == (ExitCode.UNHEALTHY, BLOCKS)


def test_forget_says_what_storage_may_still_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is without the prompt, and the command has failed all the same."""
    admin = FakeAdmin()
    admin.reply = protocol.PrefixForgotten(id=1, device=0, host=3, stored=1, in_use=0, left_in_storage="it is detached")
    monkeypatch.setattr(kvcached_client, "Admin", admin)

    result = CliRunner().invoke(main, ["forget", "a", "--keys", "-", "--deadline-ms", "70"], input="00" * 16)
    assert (result.exit_code, result.stdout.splitlines()) == (
        ExitCode.UNHEALTHY,
        [
            "removed: 0 copies on devices, 3 in host memory, 1 blocks in storage",
            "storage may have some still: it is detached",
        ],
    )
    assert admin.asked == [("forget", ("a", bytes(16)), {"from_block": 0, "deadline_ms": 70})]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["z", "--keys", "-"], "is not a key"),
        (["a", "--tokens", "-", "--from-block", "4"], "a prompt of 4 blocks, of which 4 stay"),
        (["a", "--tokens", "-", "--from-block", "-1"], "--from-block"),
        (["a", "--tokens", "-", "--deadline-ms", "0"], "--deadline-ms"),
        (["a"], "give either --tokens or --keys"),
    ],
)
def test_forget_with_wrong_usage_exits_with_2(office: OffloadOffice, arguments: list[str], words: str) -> None:
    """Nothing is removed by a command that does not say what."""
    result = run(*arguments)

    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert words in result.stderr
    assert office.cache.counters["forgotten_blocks"] == 0
