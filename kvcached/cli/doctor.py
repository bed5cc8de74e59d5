"""The command ``kvcached doctor``: whether an engine's environment can use the daemon."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kvcached.cli.options import EPILOG, ExitCode, json_option, print_json, run_dir_option

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


@click.command(epilog=EPILOG)
@click.option(
    "--python",
    default=sys.executable,
    show_default="this one",
    help="Interpreter of the engine's environment.",
)
@click.option("--model", default="", show_default="the one in vLLM's arguments", help="Directory of a model.")
@click.option("--cuda", is_flag=True, help="Check what the CUDA driver and its devices can do, and nothing else.")
@run_dir_option
@json_option
@click.argument("vllm_arguments", nargs=-1, type=click.UNPROCESSED)
def doctor(
    python: str, model: str, run_dir: Path | None, vllm_arguments: tuple[str, ...], *, cuda: bool, as_json: bool
) -> None:
    """Check an engine's environment, and vLLM's arguments after `--`. Exit code 1 if a check fails."""
    from dataclasses import asdict

    from kvcached.doctor.checks import examine, examine_cuda
    from kvcached_client.transport.run_dir import default_run_dir

    findings = []
    checks = examine_cuda(python) if cuda else examine(python, run_dir or default_run_dir(), model, vllm_arguments)
    for finding in checks:
        findings.append(finding)
        if not as_json:
            click.echo(f"{_MARKS[finding.level]}  {finding.check}: {finding.text}")
        if not as_json and finding.fix:
            click.echo(f"      fix: {finding.fix}")
    failed = sum(finding.level == "fail" for finding in findings)
    warned = sum(finding.level == "warn" for finding in findings)
    if as_json:
        print_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        click.echo(f"{failed} failed, {warned} warnings" if failed or warned else "all checks passed")
    sys.exit(ExitCode.UNHEALTHY if failed else ExitCode.OK)
