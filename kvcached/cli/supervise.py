"""The command ``kvcached supervise``: the daemon, started again when it dies, and its memory kept meanwhile."""

from __future__ import annotations

import sys

import click

from kvcached.cli.options import EPILOG, ExitCode, fail


@click.command(
    epilog=EPILOG,
    context_settings={"ignore_unknown_options": True},
    options_metavar="[OPTIONS] [OPTIONS OF serve]",
)
@click.option(
    "--failed-starts-max",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Give up after the daemon has died this many times in a row before it was ready.",
)
@click.option(
    "--log-format",
    type=click.Choice(["plain", "json"]),
    default="plain",
    envvar="KVCACHED_LOG_FORMAT",
    show_envvar=True,
    show_default=True,
    help="Format of supervise's own log; if given, also passed to the daemon.",
)
@click.argument("serve_arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def supervise(
    context: click.Context, failed_starts_max: int, log_format: str, serve_arguments: tuple[str, ...]
) -> None:
    """Run `kvcached serve` with these arguments, restart it when it dies, and keep its memory meanwhile."""
    from click.core import ParameterSource

    from kvcached.log import set_up_logging
    from kvcached.recovery.supervise import Policy, serve_command
    from kvcached.recovery.supervise import supervise as run

    set_up_logging("info", "json" if log_format == "json" else "plain")
    given = context.get_parameter_source("log_format") is ParameterSource.COMMANDLINE
    passed_on = ["--log-format", log_format] if given else []
    try:
        status = run(serve_command([*passed_on, *serve_arguments]), Policy(failed_starts_max=failed_starts_max))
    except OSError as error:
        fail(ExitCode.START_FAILED, str(error))
    sys.exit(status)
