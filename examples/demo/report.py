"""What `kvcached demo` has shown: a table, bars, and one sentence."""

from __future__ import annotations

from statistics import median
from typing import Final, Literal, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

#: Where a round's blocks are expected.
Source = Literal["computed", "device", "host", "disk"]

#: Characters of the longest bar.
_BAR: Final = 26
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


class RoundKind(NamedTuple):
    """What a round is about: a name for tables, its meaning in words, and where its blocks are expected."""

    name: str
    meaning: str
    source: Source


COLD: Final = RoundKind("cold", "first time: computed", "computed")
DEVICE: Final = RoundKind("again", "again: from the device pool", "device")
HOST: Final = RoundKind("evicted", "others took its slots: from host memory", "host")
ENGINE_KILLED: Final = RoundKind("engine killed", "engine killed, restarted: device pool", "device")
REPLICA: Final = RoundKind("second replica", "second replica: from host memory", "host")
OWN_COLD: Final = RoundKind("own memory, cold", "engine with its own memory: computed", "computed")
OWN_HOST: Final = RoundKind("own memory, again", "the same again: from host memory", "host")
DAEMON_KILLED: Final = RoundKind("daemon killed", "daemon killed: computed", "computed")
DAEMON_BACK: Final = RoundKind("daemon back", "daemon back: from host memory", "host")
DISK: Final = RoundKind("all restarted", "everything restarted: from disk", "disk")


class Round(msgspec.Struct, frozen=True):
    """All prompts once. Times and counts by prompt."""

    name: str
    meaning: str
    replica: str
    source: Source
    first_token_ms: list[float]
    hit_tokens: list[int]
    loaded_tokens: list[int]  #: of the hit: copied back from the host pool
    tokens_equal: bool  #: to those of the first round
    logits_equal: bool  #: bit for bit, in every step

    @property
    def hits(self) -> bool:
        """Whether every prompt was found where it is expected, or nowhere where it had to be computed."""
        if self.source in {"host", "disk"}:  # from disk they come by way of the host pool
            return min(self.loaded_tokens) > 0
        if self.source == "computed":
            return max(self.hit_tokens) == 0
        return min(self.hit_tokens) > 0 and max(self.loaded_tokens) == 0


class Report(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    tp: int
    prompt_tokens: list[int]
    output_tokens: int
    restart_ms: float  #: SIGKILL of the engine group until its successor is ready
    rounds: list[Round]
    outputs_identical: bool


def print_report(report: Report) -> None:
    """The table, the bars and the sentence, on stdout."""
    console = Console()
    console.print(_table(report))
    console.print(f"\nfirst token, median of {len(report.prompt_tokens)} prompts", highlight=False)
    for line in bars(report.rounds):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"\n{sentence(report)}", highlight=False)
    console.print(f"outputs identical: {'yes' if report.outputs_identical else 'no'}", highlight=False)


def _table(report: Report) -> Table:
    prompts = f"{len(report.prompt_tokens)} prompts of {report.prompt_tokens[0]} tokens"
    table = Table(title=f"{prompts}, one at a time, TP={report.tp}")
    numbers = {"first token", "hit tokens", "from host"}
    for heading in ("round", "first token", "hit tokens", "from host", "outputs"):
        table.add_column(heading, justify="right" if heading in numbers else "left", no_wrap=True)
    for each in report.rounds:
        table.add_row(
            each.name,
            "  ".join(f"{value:.0f} ms" for value in each.first_token_ms),
            "  ".join(str(value) for value in each.hit_tokens),
            "  ".join(str(value) for value in each.loaded_tokens),
            "identical" if each.tokens_equal and each.logits_equal else "differ",
        )
    return table


def bars(rounds: list[Round]) -> list[str]:
    """A line for each round: its meaning, its time, and a bar as long as the time. Bars show no more than an eighth."""
    longest = max(median(each.first_token_ms) for each in rounds)
    width = max(len(each.meaning) for each in rounds)
    lines = []
    for each in rounds:
        time_ms = median(each.first_token_ms)
        eighths = max(1, round(time_ms / longest * _BAR * 8))
        bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        lines.append(f"{each.meaning:<{width}}  {time_ms:6.0f} ms  {bar}")
    return lines


def sentence(report: Report) -> str:
    """What was shown, in one sentence."""
    times = {each.name: f"{median(each.first_token_ms):.0f} ms" for each in report.rounds}
    outputs = "all outputs are identical" if report.outputs_identical else "OUTPUTS DIFFER"
    return (
        f"First token {times[COLD.name]} → {times[DEVICE.name]} from the cache; "
        f"after SIGKILL of the engine {times[ENGINE_KILLED.name]}; in a second replica {times[REPLICA.name]}; "
        f"after SIGKILL of the daemon {times[DAEMON_BACK.name]}; "
        f"from disk after a restart of everything {times[DISK.name]}; {outputs}."
    )
