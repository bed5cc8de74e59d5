"""The command line: ``python -m benchmarks [suite ...] [--json] [--rounds N]``, and ``replay`` and ``eviction``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator

import msgspec
from rich.console import Console
from rich.table import Column, Table

from benchmarks import eviction_command, replay_command, soak_command
from benchmarks.result import Result
from benchmarks.suites import DEFAULT_SUITES, SUITES, load_suite
from benchmarks.timing import ROUNDS_DEFAULT, ROUNDS_MIN


def main(arguments: list[str] | None = None) -> None:
    """Run the named suites and print their results; the verdicts are in the output, not in the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == [replay_command.NAME]:
        replay = replay_command.parse(given[1:])
        _print(replay_command.run(replay), as_json=replay.json)
        return
    if given[:1] == [eviction_command.NAME]:
        eviction = eviction_command.parse(given[1:])
        _print(eviction_command.run(eviction), as_json=eviction.json)
        return
    if given[:1] == [soak_command.NAME]:
        soak = soak_command.parse(given[1:])
        _print(soak_command.run(soak), as_json=soak.json)
        return
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure kvcached against its targets.",
        epilog=f"Other commands: {replay_command.NAME} --help, {eviction_command.NAME} --help (for recorded requests), "
        f"{soak_command.NAME} --help.",
    )
    parser.add_argument(
        "suites",
        nargs="*",
        type=_suite,
        default=list(DEFAULT_SUITES),
        metavar="suite",
        help=f"of: {', '.join(SUITES)}; default: {', '.join(DEFAULT_SUITES)}",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument(
        "--rounds",
        type=_rounds,
        default=ROUNDS_DEFAULT,
        help=f"interleaved rounds of each suite, at least {ROUNDS_MIN} (default: {ROUNDS_DEFAULT})",
    )
    options = parser.parse_args(given)
    _print(_measure(options.suites, options.rounds), as_json=options.json)


def _print(results: Iterable[Result], *, as_json: bool) -> None:
    if as_json:
        for result in results:
            print(msgspec.json.encode(result).decode(), flush=True)
    else:
        table = _table(results)
        Console(width=None if sys.stdout.isatty() else 120).print(table)


def _measure(suites: list[str], rounds: int) -> Iterator[Result]:
    """Results as they come; how far it is goes to stderr, for a suite may take minutes."""
    for suite in suites:
        print(f"suite {suite}: building", file=sys.stderr, flush=True)
        for result in load_suite(suite)(rounds):
            print(f"suite {suite}: {result.metric} done", file=sys.stderr, flush=True)
            yield result


def _suite(text: str) -> str:
    if text not in SUITES:
        raise argparse.ArgumentTypeError(f"no suite {text!r}; there are: {', '.join(SUITES)}")
    return text


def _rounds(text: str) -> int:
    rounds = int(text)
    if rounds < ROUNDS_MIN:
        raise argparse.ArgumentTypeError(f"{rounds} is less than {ROUNDS_MIN}")
    return rounds


def _table(results: Iterable[Result]) -> Table:
    table = Table(Column("metric", no_wrap=True, min_width=34), "value", "unit", "floor", "ratio", "target", "")
    for result in results:
        verdict = {True: "[green]ok[/]", False: "[red]missed[/]", None: ""}[result.ok]
        numbers = ["" if number is None else f"{number:.4g}" for number in (result.value, result.floor, result.ratio)]
        value, floor, ratio = numbers
        table.add_row(f"{result.suite}/{result.metric}", value, result.unit, floor, ratio, result.target or "", verdict)
    return table


if __name__ == "__main__":
    main()
