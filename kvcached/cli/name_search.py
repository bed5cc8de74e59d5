"""Why a prompt missed: what the daemon says of it, and of the same tokens under names that may have been got wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from kvcached.cli.prompt_keys import Daemon, Prompt, replica_chain, vllm_keys
from kvcached_client.protocol.engine import Explanation, ReplicaInfo
from kvcached_client.types import KEY_SIZE_BYTES, MissReason
from kvcached_client.vllm.keys import VllmHashing

#: Nothing is missing, so no other name could do better.
_COMPLETE: Final = frozenset({MissReason.HIT, MissReason.LAST_TOKEN})
_VLLM_HINT: Final = (
    "check how vLLM hashes: --prefix-caching-hash-algo (with its default, sha256, only its own Python can compute the "
    "keys; sha256_cbor is needed here) and PYTHONHASHSEED"
)

#: A question that another name of the prompt leads to: how it differs, what must be wrong then, how to ask it.
_Candidate = tuple[str, str, Callable[[], "Verdict"]]


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
