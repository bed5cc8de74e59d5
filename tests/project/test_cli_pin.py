"""`kvcached pin` and `unpin`: from a prompt's tokens to what stays, over a service without sockets."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner, Result

import kvcached_client
from kvcached.cli.main import ExitCode, main
from kvcached.core.messages import Ticked
from kvcached_client import KeyChain
from kvcached_client.protocol import engine as protocol
from kvcached_client.vllm.keys import VllmHashing, block_keys
from tests.project.admins import OfficeAdmin
from tests.service.office import ONE, TWO, FakePeer
from tests.service.offload_office import OffloadOffice

TOKENS = list(range(100, 118))
#: Four full blocks: a quarter of the pool's slots, which is what may be pinned.
BLOCKS = 4
NAMESPACE = b"n" * 32
VLLM = VllmHashing(block_size=4)
ADAPTER = ("sql", "/models/sql")


@pytest.fixture
def office(monkeypatch: pytest.MonkeyPatch) -> OffloadOffice:
    """A service with replica a, and namespace tiny of an engine in offload mode; both are empty."""
    made = OffloadOffice()
    made.enter(FakePeer(1))
    monkeypatch.setattr(kvcached_client, "Admin", OfficeAdmin(made))
    return made


def native(tokens: list[int], *, salt: str = "", lora: str = "") -> bytes:
    return KeyChain(NAMESPACE, 4, tokens, salt=salt, lora=lora).keys


def attach(office: OffloadOffice, keys: bytes, **fields: Any) -> None:
    """An engine in offload mode that stores these blocks."""
    welcome = office.attach(FakePeer(2), peer=TWO, **fields)
    held = office.expect(protocol.Held, office.acquire(keys), keys, peer=TWO)
    plan = office.expect(protocol.StorePrepared, office.prepare_store(held.lease), keys, peer=TWO)
    for shard in range(2):
        office.expect(protocol.Settled, office.transfer_done(welcome, plan.transfer, shard), peer=ONE)


def shown(office: OffloadOffice) -> str:
    """What is shown of the namespace of engines in offload mode."""
    (root,) = office.cache.offload.namespaces.by_root
    return root.hex()[:16]


def run(*arguments: str, stdin: object = TOKENS) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin if isinstance(stdin, str) else json.dumps(stdin))


def pin(*arguments: str, stdin: object = TOKENS) -> dict[str, Any]:
    """What pin says in JSON."""
    result = run("pin", *arguments, "--json", stdin=stdin)
    assert result.exit_code == ExitCode.OK, result.output
    said: dict[str, Any] = json.loads(result.stdout)
    return said


def kept(said: dict[str, Any]) -> tuple[int, int, int]:
    """Of how many blocks how many on the device and in host memory."""
    return said["blocks"], said["device"], said["host"]


# --- whose keys -----------------------------------------------------------------------------------------------------


def test_pin_of_a_replica_keeps_device_and_host_blocks(office: OffloadOffice) -> None:
    """The keys are those that engines of the replica send, with salt and adapter; what fills no block is left out."""
    office.store(native(TOKENS, salt="s", lora="l"))
    office.workers["a"].end_all()

    named = ("a", "--tokens", "-", "--salt", "s", "--lora", "l")
    assert kept(pin(*named)) == (BLOCKS, BLOCKS, BLOCKS)
    assert kept(pin("a", "--tokens", "-")) == (BLOCKS, 0, 0)


def test_pin_of_a_replicas_namespace_keeps_host_blocks(office: OffloadOffice) -> None:
    """A replica's namespace by its hex digits, as many as one likes, is that of its host copies alone."""
    office.store(native(TOKENS))
    office.workers["a"].end_all()

    for digits in (8, 16, 64):
        assert kept(pin(NAMESPACE.hex()[:digits], "--tokens", "-")) == (BLOCKS, 0, BLOCKS)


@pytest.mark.parametrize("target", ["a", "6e6e6e6e"])
def test_pin_takes_a_target_for_a_replica_before_a_label(office: OffloadOffice, target: str) -> None:
    """What engines in offload mode call their namespace hides neither a replica's name nor its namespace."""
    office.store(native(TOKENS))
    office.workers["a"].end_all()
    office.attach(FakePeer(2), peer=TWO, label=target)

    assert kept(pin(target, "--tokens", "-"))[2] == BLOCKS
    assert "means replica 'a'" in run("pin", target, "--engine", "vllm", "--tokens", "-").stderr


def test_pin_for_vllm_takes_the_block_size_of_the_namespace(office: OffloadOffice) -> None:
    """A namespace of vLLM is named by its label or hex digits; keys are hashed as vLLM does, in its blocks."""
    attach(office, block_keys(TOKENS, VLLM, salt="s", lora=ADAPTER))
    named = ("--engine", "vllm", "--tokens", "-", "--salt", "s", "--lora", "sql:/models/sql")

    for target in ("tiny", shown(office), shown(office)[:4]):
        assert kept(pin(target, *named)) == (BLOCKS, 0, BLOCKS)
    assert kept(pin("tiny", *named, "--block-size", "8")) == (BLOCKS // 2, 0, 0)
    assert kept(pin("tiny", *named, "--hash-seed", "7")) == (BLOCKS, 0, 0)


def test_pin_of_keys_takes_them_as_they_are(office: OffloadOffice) -> None:
    """Keys, and the first half of longer hashes, need no tokens, wherever they are pinned."""
    keys = native(TOKENS)
    office.store(keys)
    lines = [keys[:16].hex(), keys[16:32].hex() + "00" * 16]

    assert kept(pin("a", "--keys", "-", stdin="\n".join(lines))) == (2, 2, 2)


# --- for how long ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "ttl_s"), [([], 3600), (["--ttl-s", "90"], 90)])
def test_pin_says_until_when(office: OffloadOffice, arguments: list[str], ttl_s: int) -> None:
    """What is kept is kept for an hour, or for as long as was said, and the daemon and the answer mean the same."""
    office.store(native(TOKENS))
    earliest = datetime.now(tz=UTC).replace(microsecond=0) + timedelta(seconds=ttl_s)
    said = datetime.fromisoformat(pin("a", "--tokens", "-", *arguments)["until"])
    assert earliest <= said <= datetime.now(tz=UTC) + timedelta(seconds=ttl_s)

    for now_ms, pinned in ((ttl_s * 1000 - 1, BLOCKS), (ttl_s * 1000, 0)):
        office.service.on_event(Ticked(now_ms))
        assert office.cache.pins.blocks(office.cache.tree_of("a"), office.cache.pools["a"]) == pinned


def test_unpin_says_whether_it_was_pinned(office: OffloadOffice) -> None:
    """The second time there is nothing to end, which is no mistake."""
    office.store(native(TOKENS))
    named = ("a", "--tokens", "-")
    pin(*named)

    said = [run("unpin", *named), run("unpin", *named)]
    assert [(each.exit_code, each.stdout) for each in said] == [
        (ExitCode.OK, "the prompt is no longer pinned\n"),
        (ExitCode.OK, "the prompt was not pinned\n"),
    ]
    pin(*named)
    assert [json.loads(run("unpin", *named, "--json").stdout) for _ in range(2)] == [
        {"was_pinned": True},
        {"was_pinned": False},
    ]


def test_pin_for_people_is_a_line(office: OffloadOffice) -> None:
    """How many blocks are kept of how many, where and until when; where it is none, what to do."""
    nothing = run("pin", "a", "--tokens", "-").stdout.splitlines()
    office.store(native(TOKENS[:8]))
    (line,) = run("pin", "a", "--tokens", "-").stdout.splitlines()
    (of_host,) = run("pin", "6e6e6e6e", "--tokens", "-").stdout.splitlines()

    assert line.startswith("pinned until 20")
    assert line.endswith("Z, of 4 blocks: 2 on the device, 2 in host memory")
    assert of_host.endswith("0 on the device, 2 in host memory")
    assert nothing[1:] == ["no block of the prompt is cached: pin it again after an engine has computed it"]


# --- refusals -------------------------------------------------------------------------------------------------------


def test_pin_over_the_quota_is_refused_in_the_daemons_words(office: OffloadOffice) -> None:
    """The reason is on stderr with what to do; it is no wrong usage, for later it may work."""
    office.store(native([*TOKENS, *TOKENS]))

    result = run("pin", "a", "--tokens", "-", stdin=[*TOKENS, *TOKENS])
    assert (result.exit_code, result.stdout) == (ExitCode.UNHEALTHY, "")
    assert "9 more are over the quota of 4 (unpin what need not stay" in result.stderr


@pytest.mark.parametrize("command", ["pin", "unpin"])
@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (["z", "--tokens", "-"], TOKENS, "there are: a, ROOT (tiny)"),
        (["z", "--engine", "vllm", "--tokens", "-"], TOKENS, "is called 'z'"),
        (["6e6", "--tokens", "-"], TOKENS, "is called '6e6'"),
        (["ROOT" + "0" * 48, "--engine", "vllm", "--tokens", "-"], TOKENS, "0 namespaces are meant"),
        (["z", "--keys", "-"], "00" * 16, "0 namespaces are meant by 'z'"),
        (["a", "--engine", "vllm", "--tokens", "-"], TOKENS, "leave out --engine vllm"),
        (["tiny", "--tokens", "-"], TOKENS, "give --engine vllm"),
        (["a", "--tokens", "-"], TOKENS[:3], "3 tokens do not fill a block of 4"),
        (["tiny", "--engine", "vllm", "--tokens", "-"], [], "0 tokens do not fill a block of 4"),
        (["tiny", "--engine", "vllm", "--block-size", "32", "--tokens", "-"], TOKENS, "do not fill a block of 32"),
        (["tiny", "--engine", "vllm", "--hash-algo", "sha256", "--tokens", "-"], TOKENS, "sha256_cbor"),
        (["tiny", "--engine", "vllm", "--lora", "sql", "--tokens", "-"], TOKENS, "give name:path"),
        (["a", "--keys", "-"], "", "a prefix of no blocks"),
        (["a", "--keys", "-", "--salt", "s"], "00" * 16, "given keys already contain"),
        (["a"], "", "give either --tokens or --keys"),
        (["--tokens", "-"], TOKENS, "REPLICA-OR-NAMESPACE"),
        (["a", "--tokens", "-", "--replica", "a"], TOKENS, "--replica"),
    ],
)
def test_pin_with_wrong_usage_exits_with_2(
    office: OffloadOffice, command: str, arguments: list[str], stdin: object, words: str
) -> None:
    """A target that is not there, that has other keys, and a prompt without a full block are told with what helps."""
    office.attach(FakePeer(2), peer=TWO)

    result = run(command, *(each.replace("ROOT", shown(office)) for each in arguments), stdin=stdin)
    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert words.replace("ROOT", shown(office)) in result.stderr
    assert office.cache.counters["pins_set"] == 0


@pytest.mark.parametrize("ttl_s", ["0", "604801", "1.5"])
def test_pin_is_for_a_second_to_a_week(office: OffloadOffice, ttl_s: str) -> None:
    """Longer than a week is said again, and no time is none."""
    result = run("pin", "a", "--tokens", "-", "--ttl-s", ttl_s)

    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert "--ttl-s" in result.stderr


def test_pin_of_a_label_that_two_namespaces_have_is_refused_by_the_daemon(office: OffloadOffice) -> None:
    """Which of them is meant only more hex digits tell."""
    for peer, name in ((TWO, b"i"), (b"\0\0\0\0\3", b"j")):
        office.attach(FakePeer(peer[-1]), peer=peer, instance=name * 16, keyspace=name * 32)

    result = run("pin", "tiny", "--engine", "vllm", "--tokens", "-")
    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert "2 namespaces are meant by 'tiny'" in result.stderr
