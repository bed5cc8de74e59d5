"""The command ``kvcached explain``: why a prompt missed."""

from __future__ import annotations

from pathlib import Path
from string import hexdigits
from typing import TYPE_CHECKING, Any, Final

import click

from kvcached.cli.options import EPILOG, ask, deadline_option, json_option, print_json, run_dir_option
from kvcached.cli.prompt import hashing_of, prompt_options, read_prompt

if TYPE_CHECKING:
    from kvcached.cli.name_search import Verdict
    from kvcached.cli.prompt_keys import Daemon, Prompt
    from kvcached_client.vllm.keys import VllmHashing

_NAMESPACE_DIGITS_MAX: Final = 64


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
    from kvcached.cli.explain_text import advice, lines_of

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
    from kvcached.cli.name_search import explain_keys, explain_tokens, explain_vllm

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
