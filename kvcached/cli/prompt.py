"""How commands are told a prompt: by its tokens, with all that its keys are made from, or by its keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from string import hexdigits
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

if TYPE_CHECKING:
    from kvcached.cli.prompt_keys import Prompt
    from kvcached_client.vllm.keys import VllmHashing

#: Of a key, and of a vLLM block hash whose first half is the key.
_KEY_DIGITS: Final = (32, 64)

_OPTIONS: Final = (
    click.option("--tokens", type=click.File(), help="File with the prompt's token ids: JSON, or separated by spaces."),
    click.option(
        "--keys", type=click.File(), help="File with the keys of the prompt's full blocks instead: hex, one per line."
    ),
    click.option("--salt", default="", show_default="none", help="The request's cache salt."),
    click.option("--lora", default="", show_default="none", help="The request's adapter; for vLLM name:path."),
    click.option(
        "--engine",
        type=click.Choice(["kvcached", "vllm"]),
        default="kvcached",
        show_default=True,
        help="Which keys to compute: those of kvcached_client, or vLLM's.",
    ),
    click.option(
        "--block-size", type=click.IntRange(1), show_default="the namespace's", help="vLLM's hash block size."
    ),
    click.option(
        "--hash-algo",
        default="sha256_cbor",
        show_default=True,
        help="vLLM's --prefix-caching-hash-algo; must be a cbor one.",
    ),
    click.option("--hash-seed", show_default="not set", help="PYTHONHASHSEED of vLLM."),
)


def prompt_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of a command that `read_prompt` and `hashing_of` take."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_prompt(options: Mapping[str, Any]) -> Prompt | bytes:
    """A prompt, or the keys of its full blocks, 16 bytes each.

    Raises:
        click.UsageError: neither or both are given, they are malformed, or an option would be without effect.
    """
    from kvcached.cli.prompt_keys import Prompt

    tokens, keys = options["tokens"], options["keys"]
    if (tokens is None) == (keys is None):
        raise click.UsageError("give either --tokens or --keys: a file, or - for stdin")
    if tokens is not None:
        return Prompt(_read_tokens(tokens), salt=options["salt"], lora=options["lora"])
    if options["salt"] or options["lora"]:
        raise click.UsageError("--salt and --lora need --tokens: given keys already contain salt and adapter")
    return _read_keys(keys)


def hashing_of(options: Mapping[str, Any]) -> VllmHashing | None:
    """How vLLM hashes, with block size 0 for that of the namespace; None for keys of this project's client."""
    from kvcached_client.vllm.keys import VllmHashing

    if options["engine"] != "vllm":
        return None
    return VllmHashing(options["block_size"] or 0, options["hash_algo"], options["hash_seed"])


def _read_tokens(file: TextIO) -> list[int]:
    try:
        text = file.read()
        listed = json.loads(text) if text.lstrip().startswith("[") else [int(each) for each in text.split()]
    except ValueError as error:
        raise click.UsageError(f"--tokens: {error}: give token ids, as a JSON list or separated by spaces") from None
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in listed):
        raise click.UsageError(
            "--tokens: the list contains something other than integers: give the token ids of one prompt"
        )
    return list(listed)


def _read_keys(file: TextIO) -> bytes:
    try:
        lines = file.read().split()
    except ValueError as error:
        raise click.UsageError(f"--keys: {error}: give keys as hex digits, one per line") from None
    keys: list[bytes] = []
    for number, line in enumerate(lines, 1):
        if len(line) not in _KEY_DIGITS or not set(line) <= set(hexdigits):
            raise click.UsageError(
                f"--keys: {line!r}, key number {number}, is not a key: give 32 hex digits, or the 64 of a longer hash"
            )
        keys.append(bytes.fromhex(line)[:16])
    return b"".join(keys)
