"""`kvcached explain`: from a prompt's tokens to words, over a daemon that knows some prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

import kvcached_client
from kvcached.cli.explain import lines_of
from kvcached.cli.main import ExitCode, main
from kvcached.cli.prompt_keys import Verdict
from kvcached_client import ErrorCode, KeyChain, Refused
from kvcached_client.blocks.layout import KvGroup, Layout
from kvcached_client.protocol.engine import Description, Explanation, ReplicaInfo
from kvcached_client.types import MissReason
from kvcached_client.vllm.keys import VllmHashing, block_keys
from tests.project.admins import ConnectedAdmin, OfficeAdmin
from tests.service.office import TWO, FakePeer
from tests.service.offload_office import OffloadOffice

GROUP = KvGroup(layers=1, kv_heads=1, head_dim=8, v_head_dim=8, dtype="float32")
TOKENS = list(range(100, 143))
VLLM = VllmHashing(block_size=16)
ADAPTER = ("sql", "/models/sql")


@dataclass
class PromptsAdmin(ConnectedAdmin):
    """Two replicas of different models, and an offload namespace; each holds whole prompts by their keys."""

    stored: dict[str, list[bytes]] = field(default_factory=dict)
    reason: MissReason = MissReason.NEVER_STORED
    asked: int = 0

    def describe(self) -> Description:
        replicas = tuple(
            ReplicaInfo(
                generation=0,
                weights_version="",
                name=name,
                layout=Layout(block_size=4, shards=1, groups=(GROUP,)),
                fingerprint="",
                slots=8,
                bytes_per_block=1,
                device="cpu",
                model="m",
                key_algorithm="blake3",
                namespace=namespace.hex(),
            )
            for name, namespace in (("a", b"a" * 32), ("b", b"b" * 32))
        )
        return Description(
            id=1,
            version="",
            protocol_min=1,
            protocol_max=1,
            daemon_epoch=1,
            state="serving",
            pid=1,
            replicas=replicas,
            offload=None,
            limits={},
        )

    def explain(
        self, keys: bytes, tokens: int, *, full: bool = False, replica: str = "", namespace: str = ""
    ) -> tuple[Explanation, ...]:
        self.asked += 1
        if replica not in {"", "a", "b"}:
            raise Refused(ErrorCode.UNKNOWN_REPLICA, f"there is no replica {replica!r}", "configured are: a, b")
        places = {"a": "61" * 8, "b": "62" * 8, "": "6e" * 8}
        return tuple(
            self._explanation(name, place, keys, tokens, full=full)
            for name, place in places.items()
            if (not replica or replica == name) and place.startswith(namespace) and (name or "" in self.stored)
        )

    def _explanation(self, name: str, namespace: str, keys: bytes, tokens: int, *, full: bool) -> Explanation:
        size = 16 if not name else 4
        limit = len(keys) // 16 if full else min(len(keys) // 16, max(tokens - 1, 0) // size)
        hit = max((_common(keys[: 16 * limit], stored) for stored in self.stored.get(name, [])), default=0)
        return Explanation(
            namespace=namespace,
            replica=name,
            label="" if name else "tiny",
            generation=0,
            block_size=size,
            device=hit if name else 0,
            host=0 if name else hit,
            hit=hit,
            key=keys[16 * hit : 16 * hit + 16],
            reason=self.reason if hit < len(keys) // 16 else MissReason.HIT,
            others=0,
        )


def _common(keys: bytes, stored: bytes) -> int:
    blocks = 0
    while blocks < min(len(keys), len(stored)) // 16 and keys[: 16 * blocks + 16] == stored[: 16 * blocks + 16]:
        blocks += 1
    return blocks


def native(tokens: list[int], replica: str = "a", *, salt: str = "", lora: str = "") -> bytes:
    return KeyChain(replica.encode() * 32, 4, tokens, salt=salt, lora=lora).keys


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> PromptsAdmin:
    """A daemon that knows nothing yet."""
    fake = PromptsAdmin()
    monkeypatch.setattr(kvcached_client, "Admin", fake)
    return fake


def explain(*arguments: str, stdin: object = TOKENS) -> Result:
    return CliRunner().invoke(
        main, ["explain", *arguments], input=stdin if isinstance(stdin, str) else json.dumps(stdin)
    )


def entries(*arguments: str, stdin: object = TOKENS) -> list[dict[str, Any]]:
    """The explanations in JSON."""
    result = explain(*arguments, "--json", stdin=stdin)
    assert result.exit_code == ExitCode.OK, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["explanations"]
    return found


def told(entry: dict[str, Any]) -> dict[str, int]:
    """The variants of an entry: how they differ, and what they would hit."""
    return {each["what"]: each["hit"] for each in entry["variants"]}


# --- kvcached's own keys --------------------------------------------------------------------------------------------


def test_explain_tells_the_first_missing_block(daemon: PromptsAdmin) -> None:
    """How many blocks and tokens are a hit, which block is missing, what happened to it, and what to check."""
    daemon.stored["a"] = [native(TOKENS[:12])]
    daemon.reason = MissReason.EVICTED

    result = explain("--tokens", "-", "--replica", "a")

    key = native(TOKENS)[48:64].hex()
    first, second, third = result.stdout.splitlines()
    assert (result.exit_code, first) == (
        ExitCode.OK,
        "replica a, namespace 6161616161616161: 3 of 10 blocks are a hit, 12 of 43 tokens (3 in device)",
    )
    assert second.startswith(f"  block 3 (tokens 12 to 15), key {key}, was cached, and was evicted")
    assert third.startswith("  advice: check evicted_blocks")


@pytest.mark.parametrize("stdin", [" 100 101\n102 ", "[100, 101, 102]", "\n[100,\n101,102]"])
def test_explain_reads_tokens_as_json_or_words(daemon: PromptsAdmin, stdin: str) -> None:
    """Token ids come as a JSON list, or separated by spaces and lines."""
    assert [entry["tokens"] for entry in entries("--tokens", "-", stdin=stdin)] == [3, 3]


def test_explain_asks_every_replica_by_default(daemon: PromptsAdmin) -> None:
    """Each replica's keys are made from its own namespace."""
    daemon.stored = {"a": [native(TOKENS)], "b": [native(TOKENS[:8], "b")]}

    assert [(entry["replica"], entry["hit"], entry["reason"]) for entry in entries("--tokens", "-")] == [
        ("a", 10, "hit"),
        ("b", 2, "never_stored"),
    ]


def test_explain_finds_what_the_salt_or_the_adapter_hides(daemon: PromptsAdmin) -> None:
    """The same tokens are looked for without salt, without adapter and without both; the best comes first."""
    daemon.stored["a"] = [native(TOKENS), native(TOKENS[:16], salt="s"), native(TOKENS[:24], lora="l")]

    (entry,) = entries("--tokens", "-", "--replica", "a", "--salt", "s", "--lora", "l")

    assert list(told(entry).items()) == [
        ("without salt and adapter", 10),
        ("without the salt", 6),
        ("without the adapter", 4),
    ]
    text = explain("--tokens", "-", "--replica", "a", "--salt", "s").stdout
    assert "  the same tokens without the salt would hit 10 blocks: the salt differs\n" in text


def test_explain_finds_the_prompt_on_another_replica(daemon: PromptsAdmin) -> None:
    """A prompt that another model's replica has was sent to the wrong one."""
    daemon.stored["b"] = [native(TOKENS, "b")]

    (entry,) = entries("--tokens", "-", "--replica", "a")

    assert told(entry) == {"on replica b": 10}


def test_explain_looks_no_further_where_nothing_is_missing(daemon: PromptsAdmin) -> None:
    """A hit, or only the last token's block missing, needs no other names."""
    daemon.stored["a"] = [native(TOKENS)]
    entries("--tokens", "-", "--replica", "a", "--salt", "")
    assert daemon.asked == 1


# --- vLLM's keys ----------------------------------------------------------------------------------------------------


def test_explain_of_vllm_takes_block_size_and_names_from_the_namespace(daemon: PromptsAdmin) -> None:
    """Keys are computed as vLLM does, in blocks of the namespace's size; replicas are left out."""
    daemon.stored[""] = [block_keys(TOKENS, VLLM, salt="s", lora=ADAPTER)]

    (entry,) = entries("--engine", "vllm", "--tokens", "-", "--salt", "s", "--lora", "sql:/models/sql")

    assert (entry["label"], entry["block_size"], entry["blocks"], entry["hit"]) == ("tiny", 16, 2, 2)


def test_explain_of_vllm_tries_other_names(daemon: PromptsAdmin) -> None:
    """Without the salt, and with the seed of an engine that has none."""
    daemon.stored[""] = [block_keys(TOKENS, VllmHashing(16, seed="7")), block_keys(TOKENS[:16], VLLM, salt="s")]

    (entry,) = entries("--engine", "vllm", "--tokens", "-", "--salt", "s", "--hash-seed", "7")

    assert told(entry) == {"without the salt": 2, "with vLLM's default seed": 1}


def test_explain_of_vllm_that_is_not_known_at_all_points_at_its_hashes(daemon: PromptsAdmin) -> None:
    """Where not even the first block is known, vLLM may hash otherwise."""
    daemon.stored[""] = []
    assert "--prefix-caching-hash-algo" in entries("--engine", "vllm", "--tokens", "-")[0]["advice"]


@pytest.mark.parametrize("arguments", [("--engine", "vllm", "--tokens", "-"), ("--keys", "-", "--namespace", "ff")])
def test_explain_of_a_namespace_that_nobody_declared(daemon: PromptsAdmin, arguments: tuple[str, ...]) -> None:
    """It is an answer: no engine has declared it."""
    stdin = TOKENS if "vllm" in arguments else ""
    (entry,) = entries(*arguments, stdin=stdin)
    result = explain(*arguments, stdin=stdin)

    assert entry["reason"] == "unknown_namespace"
    assert (result.exit_code, result.stdout.count("no engine has declared")) == (ExitCode.OK, 1)


def test_explain_of_hashes_that_cannot_be_computed_says_how_to_start_vllm(daemon: PromptsAdmin) -> None:
    """Pickled hashes of vLLM are wrong usage, with the flag that helps."""
    daemon.stored[""] = []

    result = explain("--engine", "vllm", "--tokens", "-", "--hash-algo", "sha256")

    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert "--prefix-caching-hash-algo sha256_cbor" in result.stderr


# --- given keys -----------------------------------------------------------------------------------------------------


def test_explain_of_keys_asks_everywhere(daemon: PromptsAdmin) -> None:
    """Keys, and the first half of longer hashes, are looked for in replicas and namespaces; the length is not known."""
    keys = native(TOKENS)
    daemon.stored = {"a": [keys], "": [keys[:32]]}
    lines = [keys[:16].hex(), keys[16:32].hex().upper() + "00" * 16, keys[32:48].hex()]

    found = entries("--keys", "-", stdin="\n".join(lines))

    assert [(each["replica"], each["hit"], each["blocks"], each["tokens"]) for each in found] == [
        ("a", 3, 3, None),
        ("b", 0, 3, None),
        ("", 2, 3, None),
    ]
    assert [each["hit"] for each in entries("--keys", "-", "--namespace", "6E6E", stdin=lines[0])] == [1]


# --- usage, words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [
        ([], ""),
        (["--tokens", "-", "--keys", "-"], ""),
        (["--tokens", "/no/such/file"], ""),
        (["--tokens", "-"], "1 two 3"),
        (["--tokens", "-"], "[1, 2.5]"),
        (["--tokens", "-"], "[[1], [2]]"),
        (["--tokens", "-"], "[true]"),
        (["--tokens", "-"], "[" * 100_000),
        (["--tokens", "-"], "-1 2 3 4"),
        (["--tokens", "-", "--replica", "z"], "1 2"),
        (["--tokens", "-", "--namespace", "61"], "1 2"),
        (["--tokens", "-", "--namespace", "xyz"], "1 2"),
        (["--tokens", "-", "--engine", "vllm", "--replica", "a"], "1 2"),
        (["--tokens", "-", "--engine", "vllm", "--lora", "sql"], "1 2"),
        (["--tokens", "-", "--engine", "sglang"], "1 2"),
        (["--keys", "-", "--salt", "s"], "00" * 16),
        (["--keys", "-"], "00" * 15),
        (["--keys", "-"], "zz" * 16),
    ],
)
def test_explain_with_wrong_usage_exits_with_2(daemon: PromptsAdmin, arguments: list[str], stdin: str) -> None:
    """What would be without effect, or is no prompt, is refused with a reason and before anything is printed."""
    daemon.stored[""] = []

    result = explain(*arguments, stdin=stdin)

    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert result.stderr


@pytest.mark.parametrize("option", ["--tokens", "--keys"])
def test_explain_of_a_file_that_is_no_text_is_wrong_usage(daemon: PromptsAdmin, option: str, tmp_path: Path) -> None:
    """Tokens as an engine packs them are refused with a reason, and so are keys that are not in hex."""
    path = tmp_path / "packed"
    path.write_bytes(b"\xff" * 16)

    result = explain(option, str(path))

    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert f"{option}: 'utf-8' codec" in result.stderr


@pytest.mark.parametrize("reason", MissReason)
def test_explain_has_words_for_every_reason(reason: MissReason) -> None:
    """Each reason is told in at most three lines; only where all is well there is nothing to look at."""
    explanation = Explanation(
        namespace="00" * 8,
        replica="a",
        label="",
        generation=0,
        block_size=4,
        device=2,
        host=1,
        hit=3,
        key=b"k" * 16,
        reason=reason,
        others=2,
    )
    lines = lines_of(Verdict(explanation, 4, 17))

    assert len(lines) == {MissReason.HIT: 1, MissReason.UNKNOWN_NAMESPACE: 2}.get(reason, 3)
    single = lines_of(Verdict(msgspec.structs.replace(explanation, others=1), 4, None))
    assert "1 cached prompt differs" in single[-1] or reason is not MissReason.NEVER_STORED


def test_explain_over_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: an engine's block leaves the namespace by a clear, and the command says so."""
    office = OffloadOffice()
    welcome = office.attach(FakePeer(1), peer=TWO)
    office.store_blocks(welcome, 2, peer=TWO)

    monkeypatch.setattr(kvcached_client, "Admin", OfficeAdmin(office))
    keys = "\n".join(each.hex() for each in (b"\0" * 16, b"\0" * 8 + b"\1" + b"\0" * 7))
    assert [entry["reason"] for entry in entries("--keys", "-", stdin=keys)] == ["never_stored", "hit"]
