"""What a prompt's blocks are called: its keys, made as the engine makes them that has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.keys import KeyChain
from kvcached_client.protocol.engine import Description, Explanation, ReplicaInfo
from kvcached_client.types import PackedKeys
from kvcached_client.vllm.keys import VllmHashing, block_keys

#: Fewer hex digits of a namespace than these mean none, and only the first so many of them are told: as in the daemon.
_DIGITS_MIN: Final = 4
_DIGITS_SHOWN: Final = 16


class Daemon(Protocol):
    """What is used of `Admin`."""

    def describe(self) -> Description:
        """Replicas, and what their keys are made from."""

    def explain(
        self, keys: bytes, tokens: int, *, full: bool = False, replica: str = "", namespace: str = ""
    ) -> tuple[Explanation, ...]:
        """What of a prompt would be hit, and why no more; with no keys, where prompts are looked for."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as its engine names it.

    Attributes:
        tokens: of the prompt.
        salt: of the tenant; "" for none.
        lora: of the adapter, of vLLM ``name:path``; "" for none.
    """

    tokens: Sequence[int]
    salt: str = ""
    lora: str = ""


def replica_chain(replica: ReplicaInfo, prompt: Prompt) -> KeyChain:
    """A prompt's keys on a replica.

    Raises:
        BadRequest: the tokens are none.
    """
    return KeyChain(
        bytes.fromhex(replica.namespace),
        replica.layout.block_size,
        prompt.tokens,
        lora=prompt.lora,
        salt=prompt.salt,
        algorithm=replica.key_algorithm,
    )


def vllm_keys(prompt: Prompt, hashing: VllmHashing) -> PackedKeys:
    """A prompt's keys in a vLLM that hashes so.

    Raises:
        BadRequest: keys of such an engine cannot be computed, or the prompt is malformed.
    """
    return block_keys(prompt.tokens, hashing, salt=prompt.salt, lora=_vllm_lora(prompt.lora))


def keys_at(daemon: Daemon, target: str, prompt: Prompt, hashing: VllmHashing | None) -> bytes:
    """The keys of a prompt's full blocks, of which there is one at least, in the namespace that is meant.

    Args:
        daemon: to ask.
        target: a replica by its name, or a namespace as `Admin.pin` takes it.
        prompt: to be named.
        hashing: how vLLM hashes, block size 0 taking that of the namespace; None for kvcached's own keys.

    Raises:
        RequestError: there is no such target, or it has other keys; the prompt is malformed or shorter than a block.
    """
    place = _find_place(daemon, target)
    if hashing is None:
        block_size, keys = place.block_size, _own_keys(daemon, place, prompt)
    else:
        if place.replica:
            raise request_error(
                ErrorCode.BAD_VALUE,
                f"{target!r} means replica {place.replica!r}, whose engines are not vLLM",
                "give a namespace of engines in offload mode, or leave out --engine vllm",
            )
        block_size = hashing.block_size or place.block_size
        keys = vllm_keys(prompt, replace(hashing, block_size=block_size))
    if not keys:
        raise request_error(
            ErrorCode.BAD_VALUE,
            f"{len(prompt.tokens)} tokens do not fill a block of {block_size}",
            "only full blocks are cached: give a longer prompt",
        )
    return keys


def _own_keys(daemon: Daemon, place: Explanation, prompt: Prompt) -> bytes:
    found = [each for each in daemon.describe().replicas if each.name == place.replica]
    if not found:
        raise request_error(
            ErrorCode.BAD_VALUE,
            f"namespace {place.namespace} ({place.label}) belongs to engines in offload mode",
            "give --engine vllm if the engines are vLLM, otherwise --keys",
        )
    return replica_chain(found[0], prompt).keys


def _find_place(daemon: Daemon, target: str) -> Explanation:
    """What the daemon will take a target for. Where that is more than one namespace, any of them: it will refuse."""
    places = daemon.explain(b"", 0)
    is_begin = len(target) >= _DIGITS_MIN
    found = (
        [each for each in places if each.replica == target]
        or [each for each in places if is_begin and each.namespace.startswith(target[:_DIGITS_SHOWN])]
        or [each for each in places if each.label == target]
    )
    if not found:
        names = ", ".join(each.replica or f"{each.namespace} ({each.label})" for each in places)
        raise request_error(
            ErrorCode.UNKNOWN_REPLICA,
            f"no replica and no namespace is called {target!r}; there are: {names or 'none'}",
            "give a replica's name, or the first hex digits or the label of a namespace",
        )
    return found[0]


def _vllm_lora(text: str) -> tuple[str, str] | None:
    """Name and path of an adapter of vLLM.

    Raises:
        BadRequest: it is not ``name:path``.
    """
    if not text:
        return None
    name, colon, path = text.partition(":")
    if not (name and colon and path):
        raise request_error(ErrorCode.BAD_VALUE, f"adapter {text!r}", "give name:path, where vLLM has name=path")
    return name, path
