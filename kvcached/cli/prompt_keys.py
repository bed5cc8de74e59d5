"""A prompt's keys, computed as its engine computes them, and what the daemon knows of these and of similar keys.

If a prompt missed, the same tokens may be cached under another salt, adapter or seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

from kvcached.log import escaped
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.keys import KeyChain
from kvcached_client.protocol.engine import Description, Explanation, ReplicaInfo
from kvcached_client.types import KEY_SIZE_BYTES, MissReason, PackedKeys
from kvcached_client.vllm.keys import VllmHashing, block_keys

#: Fewer hex digits of a namespace than these mean none, and only the first so many of them are told: as in the daemon.
_DIGITS_MIN: Final = 4
_DIGITS_SHOWN: Final = 16
#: Nothing is missing, so no other name could do better.
_COMPLETE: Final = frozenset({MissReason.HIT, MissReason.LAST_TOKEN})
_VLLM_HINT: Final = (
    "check how vLLM hashes: --prefix-caching-hash-algo (with its default, sha256, only its own Python can compute the "
    "keys; sha256_cbor is needed here) and PYTHONHASHSEED"
)

#: A question that another name of the prompt leads to: how it differs, what must be wrong then, how to ask it.
_Candidate = tuple[str, str, Callable[[], "Verdict"]]


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
            f"namespace {place.namespace} ({escaped(place.label)}) belongs to engines in offload mode",
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
        names = ", ".join(each.replica or f"{each.namespace} ({escaped(each.label)})" for each in places)
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


@dataclass(frozen=True, slots=True)
class Variant:
    """The same tokens under another name would hit more.

    Attributes:
        what: how it differs, in words.
        differs: what must be wrong then, in words.
        hit: blocks.
    """

    what: str
    differs: str
    hit: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a prompt on one replica, or in one attached namespace.

    Attributes:
        explanation: the daemon's.
        blocks: full blocks of the prompt.
        tokens: its length; None where only its keys are known.
        variants: those that would hit more, the best one first.
        hint: what to look at first where nothing of the prompt is known; "" for nothing special.
    """

    explanation: Explanation
    blocks: int
    tokens: int | None
    variants: tuple[Variant, ...] = ()
    hint: str = ""


def explain_tokens(daemon: Daemon, prompt: Prompt, replica: str) -> list[Verdict]:
    """Why a prompt with kvcached's own keys missed on a replica, or on each ("").

    Raises:
        RequestError: there is no such replica, or the tokens are none.
    """
    replicas = daemon.describe().replicas
    if replica and all(each.name != replica for each in replicas):
        daemon.explain(b"", 0, replica=replica)  # refuses, and says what there is
    return [_on_replica(daemon, each, prompt, replicas) for each in replicas if replica in {"", each.name}]


def _on_replica(daemon: Daemon, info: ReplicaInfo, prompt: Prompt, replicas: Sequence[ReplicaInfo]) -> Verdict:
    def ask(where: ReplicaInfo, what: Prompt) -> Verdict:
        chain = replica_chain(where, what)
        (explanation,) = daemon.explain(chain.keys, chain.token_count, replica=where.name)
        return Verdict(explanation, chain.block_count, chain.token_count)

    def candidates() -> Iterator[_Candidate]:
        for what, differs, other in _other_names(prompt):
            yield what, differs, partial(ask, info, other)
        for each in replicas:
            if each.namespace != info.namespace:
                yield f"on replica {each.name}", "the model or its layout differs", partial(ask, each, prompt)

    return _with_variants(ask(info, prompt), candidates())


def explain_vllm(daemon: Daemon, prompt: Prompt, hashing: VllmHashing, namespace: str) -> list[Verdict]:
    """Why a prompt of vLLM missed, in each attached namespace that begins with these hex digits.

    Args:
        daemon: to ask.
        prompt: of one request.
        hashing: how the engine hashes; block size 0 takes that of each namespace.
        namespace: hex digits; "" for all.

    Raises:
        RequestError: keys of such an engine cannot be computed, or the prompt is malformed.
    """
    spaces = [each for each in daemon.explain(b"", 0, namespace=namespace) if not each.replica]
    return [_in_space(daemon, each, prompt, hashing) for each in spaces] or [unknown_namespace(namespace)]


def _in_space(daemon: Daemon, space: Explanation, prompt: Prompt, hashing: VllmHashing) -> Verdict:
    hashing = replace(hashing, block_size=hashing.block_size or space.block_size)

    def ask(what: Prompt, how: VllmHashing) -> Verdict:
        keys = vllm_keys(what, how)
        found = daemon.explain(keys, len(what.tokens), namespace=space.namespace)
        attached = [each for each in found if not each.replica]
        if not attached:  # forgotten meanwhile
            return unknown_namespace(space.namespace)
        is_unknown = attached[0].reason is MissReason.NEVER_STORED and not attached[0].hit
        blocks = len(keys) // KEY_SIZE_BYTES
        return Verdict(attached[0], blocks, len(what.tokens), hint=_VLLM_HINT if is_unknown else "")

    def candidates() -> Iterator[_Candidate]:
        for what, differs, other in _other_names(prompt):
            yield what, differs, partial(ask, other, hashing)
        if hashing.seed is not None and hashing.algorithm == "sha256_cbor":
            default = replace(hashing, seed=None)
            yield "with vLLM's default seed", "the engine runs without PYTHONHASHSEED", partial(ask, prompt, default)

    return _with_variants(ask(prompt, hashing), candidates())


def explain_keys(daemon: Daemon, keys: bytes, replica: str, namespace: str) -> list[Verdict]:
    """Why a prompt with these keys missed, wherever it is looked for. Every block may be a hit."""
    found = daemon.explain(keys, 0, full=True, replica=replica, namespace=namespace)
    blocks = len(keys) // KEY_SIZE_BYTES
    return [Verdict(each, blocks, None) for each in found] or [unknown_namespace(namespace)]


def unknown_namespace(namespace: str) -> Verdict:
    """What is told where nothing could be asked."""
    explanation = Explanation(
        namespace=namespace,
        replica="",
        label="",
        generation=0,
        block_size=0,
        device=0,
        host=0,
        hit=0,
        key=b"",
        reason=MissReason.UNKNOWN_NAMESPACE,
        others=0,
    )
    return Verdict(explanation, 0, None)


def _other_names(prompt: Prompt) -> Iterator[tuple[str, str, Prompt]]:
    """The same tokens without salt and adapter."""
    if prompt.salt:
        yield "without the salt", "the salt differs", replace(prompt, salt="")
    if prompt.lora:
        yield "without the adapter", "the adapter's name or version differs", replace(prompt, lora="")
    if prompt.salt and prompt.lora:
        yield "without salt and adapter", "both differ", replace(prompt, salt="", lora="")


def _with_variants(verdict: Verdict, candidates: Iterator[_Candidate]) -> Verdict:
    """Add the variants that would hit more. They are asked for only where something is missing."""
    if verdict.explanation.reason in _COMPLETE:
        return verdict
    asked = (Variant(what, differs, ask().explanation.hit) for what, differs, ask in candidates)
    better = [each for each in asked if each.hit > verdict.explanation.hit]
    return replace(verdict, variants=tuple(sorted(better, key=lambda each: -each.hit)))
