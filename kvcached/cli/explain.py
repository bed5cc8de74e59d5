"""The command ``kvcached explain``: why a prompt missed, in words."""

from __future__ import annotations

from pathlib import Path
from string import hexdigits
from typing import TYPE_CHECKING, Any, Final

import click

from kvcached.cli.options import (
    EPILOG,
    ask,
    deadline_option,
    hashing_of,
    json_option,
    print_json,
    prompt_options,
    read_prompt,
    run_dir_option,
)
from kvcached.log import escaped
from kvcached_client.types import MissReason

if TYPE_CHECKING:
    from kvcached.cli.prompt_keys import Daemon, Prompt, Verdict
    from kvcached_client.vllm.keys import VllmHashing

_NAMESPACE_DIGITS_MAX: Final = 64
#: Of the block behind the hit: what became of it, and what to look at.
_MEANINGS: Final = {
    MissReason.HIT: ("", ""),
    MissReason.LAST_TOKEN: (
        "is cached, but holds the prompt's last token",
        "nothing to do: at least one token must be computed to get an output",
    ),
    MissReason.NEVER_STORED: ("was never stored, or was evicted too long ago to be remembered", ""),
    MissReason.EVICTED: (
        "was cached, and was evicted because another block needed its slot",
        "check evicted_blocks and host_evicted_blocks in `kvcached stats`; configure more slots or a larger host pool",
    ),
    MissReason.CORRUPT_OR_FAILED: (
        "was dropped: its copy failed or was damaged, or its engine ended before the copy was complete",
        "check the daemon's log, and store_failed_blocks, load_failed_blocks and corrupt_blocks in `kvcached stats`",
    ),
    MissReason.NO_ROOM: (
        "was not stored: every host slot was in use when it was computed",
        "check store_refused_blocks in `kvcached stats`; configure a larger host pool, or run fewer requests at once",
    ),
    MissReason.WORKER_LOST: (
        "is in host memory, and a worker that would load it has died; another one is being started",
        "the daemon's log, which says how the worker ended",
    ),
    MissReason.CLEARED: (
        "was stored before the namespace was cleared",
        "find out what cleared it: an engine clears when its weights change or its prefix cache is reset",
    ),
    MissReason.FORGOTTEN: (
        "was removed on request",
        "nothing to do: somebody has run `kvcached forget`, and the block is cached again once it is computed",
    ),
    MissReason.FILLING: ("is being stored right now", "send the same request again in a moment"),
    MissReason.BELOW_THRESHOLD: (
        "is in host memory, but a hit of so few blocks is computed instead of loaded",
        "check load_threshold_blocks of the replica in the configuration",
    ),
    MissReason.OVER_QUOTA: (
        "is in host memory, but the limit of blocks being loaded is reached",
        "check load_quota_blocks of the replica in the configuration",
    ),
    MissReason.PAUSED: (
        "is in host memory, but copies of the replica are paused",
        "end the pause with `kvcached resume`",
    ),
    MissReason.OTHER_REPLICA: (
        "is only in the device pool of another replica",
        "check the [host] table of the configuration: replicas share blocks through host memory",
    ),
    MissReason.UNKNOWN_NAMESPACE: (
        "no engine has declared such a namespace since the daemon started",
        "check the engine's log: did the engine find the daemon? `kvcached stats` lists the namespaces",
    ),
}


class _HexType(click.ParamType[str]):
    """The first hex digits of a namespace."""

    name = "hex"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Small letters, or wrong usage."""
        if len(value) > _NAMESPACE_DIGITS_MAX or not set(value) <= set(hexdigits):
            self.fail(
                f"{value!r} is not the start of a namespace: give hex digits, as `kvcached stats` prints them",
                param,
                ctx,
            )
        return value.lower()


@click.command(epilog=EPILOG)
@prompt_options
@click.option("--replica", default="", show_default="all", help="Name of the replica that missed.")
@click.option("--namespace", type=_HexType(), default="", show_default="all", help="First hex digits of the namespace.")
@run_dir_option
@deadline_option
@json_option
def explain(run_dir: Path | None, deadline_ms: int, *, as_json: bool, **options: Any) -> None:  # noqa: ANN401 - click's
    """Say why a prompt missed: the first block that is not cached, what happened to it, and what to check."""
    _check_usage(options)
    prompt, hashing = read_prompt(options), hashing_of(options)
    where = options["replica"], options["namespace"]
    verdicts = ask(run_dir, deadline_ms, lambda admin: _verdicts(admin, prompt, hashing, *where))
    if not verdicts:
        raise click.UsageError("the daemon has no replicas: for engines in offload mode use --engine vllm, or --keys")
    if as_json:
        print_json({"explanations": [{**_fields(each), "advice": advice(each)} for each in verdicts]})
        return
    for verdict in verdicts:
        click.echo("\n".join(lines_of(verdict)))


def _check_usage(options: dict[str, Any]) -> None:
    """Refuse what would be without effect."""
    if options["tokens"] is not None and options["engine"] == "vllm" and options["replica"]:
        raise click.UsageError("--replica: engines in offload mode have no replica; give their --namespace")
    if options["tokens"] is not None and options["engine"] == "kvcached" and options["namespace"]:
        raise click.UsageError("--namespace: give --replica, or --engine vllm for engines in offload mode")


def _verdicts(
    daemon: Daemon, prompt: Prompt | bytes, hashing: VllmHashing | None, replica: str, namespace: str
) -> list[Verdict]:
    from kvcached.cli.prompt_keys import explain_keys, explain_tokens, explain_vllm

    if isinstance(prompt, bytes):
        return explain_keys(daemon, prompt, replica, namespace)
    if hashing is None:
        return explain_tokens(daemon, prompt, replica)
    return explain_vllm(daemon, prompt, hashing, namespace)


def _fields(verdict: Verdict) -> dict[str, object]:
    """A verdict as JSON types."""
    from dataclasses import asdict

    import msgspec

    explanation = msgspec.to_builtins(verdict.explanation, builtin_types=(bytes,))
    return {
        **explanation,
        "key": verdict.explanation.key.hex(),
        "blocks": verdict.blocks,
        "tokens": verdict.tokens,
        "variants": [asdict(each) for each in verdict.variants],
    }


def lines_of(verdict: Verdict) -> list[str]:
    """A verdict in a few lines, the first of which says where and how much."""
    explanation = verdict.explanation
    meaning, _ = _MEANINGS[explanation.reason]
    if explanation.reason is MissReason.UNKNOWN_NAMESPACE:
        begin = f" that begins with {explanation.namespace}" if explanation.namespace else ""
        return [f"no namespace{begin}: {meaning}", f"  advice: {advice(verdict)}"]
    lines = [f"{_place(verdict)}: {_extent(verdict)}"]
    if meaning:
        lines.append(f"  block {explanation.hit}{_tokens(verdict)}, key {explanation.key.hex()}, {meaning}")
    if told := advice(verdict):
        lines.append(f"  advice: {told}")
    lines.extend(
        f"  the same tokens {each.what} would hit {each.hit} blocks: {each.differs}" for each in verdict.variants
    )
    return lines


def advice(verdict: Verdict) -> str:
    """What to look at; "" where there is nothing to do."""
    explanation = verdict.explanation
    if verdict.hint or explanation.reason is not MissReason.NEVER_STORED:
        return verdict.hint or _MEANINGS[explanation.reason][1]
    if explanation.others:
        first = explanation.hit * explanation.block_size
        others = "1 cached prompt differs" if explanation.others == 1 else f"{explanation.others} cached prompts differ"
        return (
            f"check the text from token {first} on: {others} there. Dates, names, chat templates, and the order "
            "of tools or documents often differ"
        )
    if explanation.hit:
        return "nothing to do: no earlier request had more of these tokens"
    return (
        "check whether this is the engine's namespace, and whether the engine stores blocks: committed_blocks and "
        "stored_blocks in `kvcached stats`"
    )


def _place(verdict: Verdict) -> str:
    explanation = verdict.explanation
    name = f"replica {explanation.replica}" if explanation.replica else escaped(explanation.label)
    return f"{name}, namespace {explanation.namespace}"


def _extent(verdict: Verdict) -> str:
    explanation = verdict.explanation
    tokens = (
        "" if verdict.tokens is None else f", {explanation.hit * explanation.block_size} of {verdict.tokens} tokens"
    )
    places = {"device": explanation.device, "host memory": explanation.host}
    held = " and ".join(f"{blocks} in {place}" for place, blocks in places.items() if blocks)
    return f"{explanation.hit} of {verdict.blocks} blocks are a hit{tokens}{f' ({held})' if held else ''}"


def _tokens(verdict: Verdict) -> str:
    if verdict.tokens is None:
        return ""
    size = verdict.explanation.block_size
    first = verdict.explanation.hit * size
    return f" (tokens {first} to {first + size - 1})"
