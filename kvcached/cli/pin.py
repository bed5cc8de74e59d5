"""The commands ``kvcached pin`` and ``unpin``: a prompt whose blocks stay cached, though nobody uses it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvcached.cli.options import EPILOG, ask, deadline_option, fields_of, json_option, print_json, run_dir_option
from kvcached.cli.prompt import hashing_of, prompt_options, read_prompt
from kvcached_client.protocol.admin import PIN_TTL_MS_MAX
from kvcached_client.types import KEY_SIZE_BYTES

if TYPE_CHECKING:
    from kvcached.cli.prompt_keys import Prompt
    from kvcached_client import Admin
    from kvcached_client.protocol.engine import Pinned
    from kvcached_client.vllm.keys import VllmHashing

_MS_PER_S: Final = 1000

_target_argument = click.argument("target", metavar="REPLICA-OR-NAMESPACE")


@click.command(epilog=EPILOG)
@_target_argument
@prompt_options
@click.option(
    "--ttl-s",
    type=click.IntRange(1, PIN_TTL_MS_MAX // _MS_PER_S),
    default=3600,
    show_default=True,
    help="How long to keep the blocks, in seconds.",
)
@run_dir_option
@deadline_option
@json_option
def pin(
    target: str,
    ttl_s: int,
    run_dir: Path | None,
    deadline_ms: int,
    *,
    as_json: bool,
    **options: Any,  # noqa: ANN401 - click's
) -> None:
    """Keep the cached blocks of a prompt for a time, even if no request uses them. Keeps full blocks only."""
    prompt, hashing = read_prompt(options), hashing_of(options)

    def question(admin: Admin) -> tuple[int, Pinned]:
        keys = _keys(admin, target, prompt, hashing)
        return len(keys) // KEY_SIZE_BYTES, admin.pin(target, keys, ttl_ms=ttl_s * _MS_PER_S)

    blocks, pinned = ask(run_dir, deadline_ms, question)
    until = _in_seconds(ttl_s)
    if as_json:
        print_json({"blocks": blocks, **fields_of(pinned), "until": until})
        return
    click.echo(f"pinned until {until}, of {blocks} blocks: {pinned.device} on the device, {pinned.host} in host memory")
    if not (pinned.device or pinned.host):
        click.echo("no block of the prompt is cached: pin it again after an engine has computed it")


@click.command(epilog=EPILOG)
@_target_argument
@prompt_options
@run_dir_option
@deadline_option
@json_option
def unpin(
    target: str,
    run_dir: Path | None,
    deadline_ms: int,
    *,
    as_json: bool,
    **options: Any,  # noqa: ANN401 - as above
) -> None:
    """End the pin with the same target and the same prompt. Does nothing if there is none."""
    prompt, hashing = read_prompt(options), hashing_of(options)
    was_pinned = ask(run_dir, deadline_ms, lambda admin: admin.unpin(target, _keys(admin, target, prompt, hashing)))
    if as_json:
        print_json({"was_pinned": was_pinned})
    else:
        click.echo("the prompt is no longer pinned" if was_pinned else "the prompt was not pinned")


def _keys(admin: Admin, target: str, prompt: Prompt | bytes, hashing: VllmHashing | None) -> bytes:
    from kvcached.cli.prompt_keys import keys_at

    return prompt if isinstance(prompt, bytes) else keys_at(admin, target, prompt, hashing)


def _in_seconds(seconds: int) -> str:
    """A moment from now, as the log writes it."""
    moment = datetime.now(tz=UTC) + timedelta(seconds=seconds)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
