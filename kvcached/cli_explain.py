"""The command ``kvcached explain``: why a prompt missed."""

from __future__ import annotations

import json
from pathlib import Path
from string import hexdigits
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

from kvcached.cli_common import EPILOG, ask, deadline_option, json_option, print_json, run_dir_option

if TYPE_CHECKING:
    from kvcached.explain import Daemon, Verdict

#: Of a key, and of a vLLM block hash whose first half is the key.
_KEY_DIGITS: Final = (32, 64)
_NAMESPACE_DIGITS_MAX: Final = 64


class _HexType(click.ParamType[str]):
    """The first hex digits of a namespace."""

    name = "hex"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Small letters, or wrong usage."""
        if len(value) > _NAMESPACE_DIGITS_MAX or not set(value) <= set(hexdigits):
            self.fail(f"{value!r} begins no namespace: give hex digits, as `kvcached stats` prints them", param, ctx)
        return value.lower()


@click.command(epilog=EPILOG)
@click.option("--tokens", type=click.File(), help="File with the prompt's token ids: JSON, or separated by spaces.")
@click.option("--keys", type=click.File(), help="File with the keys of its full blocks instead: hex, one a line.")
@click.option("--replica", default="", show_default="all", help="Name of the replica that missed.")
@click.option("--namespace", type=_HexType(), default="", show_default="all", help="First hex digits of the namespace.")
@click.option("--salt", default="", show_default="none", help="The request's cache salt.")
@click.option("--lora", default="", show_default="none", help="The request's adapter; for vLLM name:path.")
@click.option(
    "--engine",
    type=click.Choice(["kvcached", "vllm"]),
    default="kvcached",
    show_default=True,
    help="Whose keys: those of this project's client, or vLLM's.",
)
@click.option("--block-size", type=click.IntRange(1), show_default="the namespace's", help="vLLM's hash block size.")
@click.option(
    "--hash-algo", default="sha256_cbor", show_default=True, help="vLLM's --prefix-caching-hash-algo: a cbor one."
)
@click.option("--hash-seed", show_default="not set", help="PYTHONHASHSEED of vLLM.")
@run_dir_option
@deadline_option
@json_option
def explain(run_dir: Path | None, deadline_ms: int, *, as_json: bool, **options: Any) -> None:  # noqa: ANN401 - click's
    """Say why a prompt missed: the first block that is not cached, what became of it, and what to look at."""
    from kvcached.explain_text import advice, lines_of

    _check_usage(options)
    read = _read_tokens(options["tokens"]) if options["tokens"] else _read_keys(options["keys"])
    verdicts = ask(run_dir, deadline_ms, lambda admin: _verdicts(admin, read, **options))
    if not verdicts:
        raise click.UsageError("the daemon has no replicas: for engines in attached mode use --engine vllm, or --keys")
    if as_json:
        print_json({"explanations": [{**_fields(each), "advice": advice(each)} for each in verdicts]})
        return
    for verdict in verdicts:
        click.echo("\n".join(lines_of(verdict)))


def _check_usage(options: dict[str, Any]) -> None:
    """Refuse what would be without effect."""
    if (options["tokens"] is None) == (options["keys"] is None):
        raise click.UsageError("give either --tokens or --keys: a file, or - for stdin")
    if options["keys"] is not None and (options["salt"] or options["lora"]):
        raise click.UsageError("--salt and --lora make keys from tokens: given keys have theirs already")
    if options["tokens"] is not None and options["engine"] == "vllm" and options["replica"]:
        raise click.UsageError("--replica: engines in attached mode have no replica; name their --namespace")
    if options["tokens"] is not None and options["engine"] == "kvcached" and options["namespace"]:
        raise click.UsageError("--namespace: name the --replica, or --engine vllm for engines in attached mode")


def _verdicts(daemon: Daemon, read: list[int] | bytes, **options: Any) -> list[Verdict]:  # noqa: ANN401 - as above
    from kvcached.explain import Prompt, explain_keys, explain_tokens, explain_vllm
    from kvcached_client.vllm_keys import VllmHashing

    if isinstance(read, bytes):
        return explain_keys(daemon, read, options["replica"], options["namespace"])
    prompt = Prompt(read, salt=options["salt"], lora=options["lora"])
    if options["engine"] == "kvcached":
        return explain_tokens(daemon, prompt, options["replica"])
    hashing = VllmHashing(options["block_size"] or 0, options["hash_algo"], options["hash_seed"])
    return explain_vllm(daemon, prompt, hashing, options["namespace"])


def _read_tokens(file: TextIO) -> list[int]:
    try:
        text = file.read()
        listed = json.loads(text) if text.lstrip().startswith("[") else [int(each) for each in text.split()]
    except ValueError as error:
        raise click.UsageError(f"--tokens: {error}: give token ids, as a JSON list or separated by spaces") from None
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in listed):
        raise click.UsageError("--tokens: the list holds more than integers: give the token ids of one prompt")
    return list(listed)


def _read_keys(file: TextIO) -> bytes:
    keys: list[bytes] = []
    for number, line in enumerate(file.read().split(), 1):
        if len(line) not in _KEY_DIGITS or not set(line) <= set(hexdigits):
            raise click.UsageError(
                f"--keys: {line!r}, the {number}. one, is no key: give 32 hex digits, or 64 of a hash"
            )
        keys.append(bytes.fromhex(line)[:16])
    return b"".join(keys)


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
