"""The driver of the replay against a small server of the tests, and what is made of its answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import replay_command
from benchmarks.__main__ import main
from benchmarks.outputs import Differences
from benchmarks.replay_http import Answer, ask, complete
from benchmarks.replay_report import report
from benchmarks.replay_run import (
    WARM_UP_CALLS,
    Play,
    differences,
    play,
    play_in_turns,
    segments,
    warm_up,
)
from benchmarks.replay_trace import Call
from tests.benchmarks.stub_server import break_off, serving


def _answer(first_token_s: float, tokens: tuple[int, ...] = (1, 2), leads: tuple[float, ...] = (1.0, 1.0)) -> Answer:
    return Answer(0.0, first_token_s, 2 * first_token_s, tokens, leads, 32)


def _calls(count: int) -> list[Call]:
    return [Call(number / 1000, tuple(range(3, 4 + number)), 2) for number in range(count)]


# --- HTTP -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [1, 7, 100_000])
def test_completion_is_read_whatever_its_pieces(tmp_path: Path, chunk_bytes: int) -> None:
    """Tokens, leads and cached tokens come out of the stream however it is cut; events without a token are no token."""

    async def talk() -> Answer:
        async with serving(tmp_path, chunk_bytes=chunk_bytes) as (socket, _):
            return await complete(socket, (3, 4), 3)

    answer = asyncio.run(talk())
    assert (answer.tokens, answer.leads, answer.cached_tokens) == ((5, 6, 7), (0.25, 0.25, 0.25), 7)
    assert 0 < answer.first_token_s <= answer.last_token_s


def test_first_token_is_timed_when_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to the first token ends with the first event that has one, not with the events before or after."""
    ticks = itertools.count(100.0)

    async def talk() -> Answer:
        async with serving(tmp_path) as (socket, _):
            loop = asyncio.get_running_loop()
            ticking = SimpleNamespace(time=lambda: next(ticks))
            monkeypatch.setattr("benchmarks.replay_http.asyncio.get_running_loop", lambda: ticking)
            try:
                return await complete(socket, (3,), 2)
            finally:
                monkeypatch.setattr("benchmarks.replay_http.asyncio.get_running_loop", lambda: loop)

    answer = asyncio.run(talk())
    assert (answer.sent_s, answer.first_token_s, answer.last_token_s) == (100.0, 1.0, 2.0)


def test_refused_request_tells_why(tmp_path: Path) -> None:
    """A status that is not 200 ends in an error with status and words."""

    async def talk() -> None:
        async with serving(tmp_path, status="400 Bad Request") as (socket, _):
            await complete(socket, (3,), 2)

    with pytest.raises(RuntimeError, match=r"refused with 400: data: "):
        asyncio.run(talk())


def test_stream_that_breaks_off_is_an_error(tmp_path: Path) -> None:
    """An error event, and a stream with too few tokens, are no answers."""

    async def talk(tokens: int) -> None:
        async with serving(tmp_path, break_off if tokens else lambda _: b"data: [DONE]\n\n") as (socket, _):
            await complete(socket, (3,), tokens or 2)

    with pytest.raises(RuntimeError, match="out of luck"):
        asyncio.run(talk(2))
    with pytest.raises(RuntimeError, match="0 tokens came for 2"):
        asyncio.run(talk(0))


def test_body_with_a_length_is_read_too(tmp_path: Path) -> None:
    """An answer that does not come in chunks ends with the connection."""

    async def talk() -> bytes:
        async with serving(tmp_path) as (socket, _):
            return await ask(socket, "POST", "/reset_prefix_cache")

    assert asyncio.run(talk()) == b'{"success":true}'


# --- the run --------------------------------------------------------------------------------------------------------


def test_play_answers_in_the_order_of_its_calls(tmp_path: Path) -> None:
    """Every call is sent once, none before its time, and answers come back in order."""
    calls = _calls(20)

    async def talk() -> tuple[float, list[Answer], list[list[int]]]:
        async with serving(tmp_path) as (socket, requests):
            start = asyncio.get_running_loop().time()
            return start, await play(socket, calls), [request["prompt"] for request in requests]

    start, answers, prompts = asyncio.run(talk())
    assert sorted(prompts) == sorted(list(call.prompt) for call in calls)
    assert [answer.tokens[0] for answer in answers] == [call.prompt[-1] + 1 for call in calls]
    assert all(answer.sent_s >= start + call.at_s for answer, call in zip(answers, calls, strict=True))


def test_segments_are_played_against_both_servers_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment goes to one server and then to the other; each is first in every other one; answers are in order."""
    monkeypatch.setattr("benchmarks.replay_run.SEGMENT_S", 0.01)
    monkeypatch.setattr("benchmarks.replay_run._QUIET_S", 0)
    calls = _calls(30)
    played: list[tuple[str, int]] = []

    async def fake(socket: Path, segment: Sequence[Call]) -> list[Answer]:
        played.append((socket.name, len(segment)))
        return [_answer(1.0, (len(call.prompt),)) for call in segment]

    monkeypatch.setattr("benchmarks.replay_run.play", fake)
    found = asyncio.run(play_in_turns(tmp_path / "without", tmp_path / "with", calls))
    assert played == [(name, 10) for name in ("without", "with", "with", "without", "without", "with")]
    assert found.without == found.cached
    assert [answer.tokens[0] for answer in found.cached] == [len(call.prompt) for call in calls]
    assert [len(segment) for segment in segments(calls)] == [10, 10, 10]


def test_warm_up_leaves_nothing_that_hits(tmp_path: Path) -> None:
    """It asks for the lengths of some calls with other tokens, and says how long a call took."""
    calls = _calls(40)

    async def talk() -> tuple[float, list[list[int]]]:
        async with serving(tmp_path) as (socket, requests):
            return await warm_up(socket, calls, (3, 512)), [request["prompt"] for request in requests]

    seconds, prompts = asyncio.run(talk())
    assert seconds > 0
    assert len(prompts) == WARM_UP_CALLS + 1
    assert not {tuple(prompt) for prompt in prompts if len(prompt) > 3} & {call.prompt for call in calls}


def test_ties_are_told_from_other_differences() -> None:
    """Outputs differ by a tie where the first token that differs was hardly ahead in one of the runs."""
    without = (_answer(1), _answer(1), _answer(1))
    cached = (_answer(1), _answer(1, (1, 3), (1.0, 1e-5)), _answer(1, (4, 2), (0.5, 1e-5)))
    assert differences(Play(tuple(_calls(3)), without, cached)) == Differences(ties=1, others=1)


def test_report_compares_with_and_without() -> None:
    """Every time has the same time without kvcached as its floor; outputs that differ miss their target."""
    cached = tuple(_answer(number / 1000, (9, 2)) for number in range(1, 101))
    without = tuple(_answer(number / 500) for number in range(1, 101))
    results = {each.metric: each for each in report("tiny", Play(tuple(_calls(100)), without, cached))}
    assert {f"tiny_{name}_p{percent}_ms" for name in ("ttft", "latency") for percent in (50, 90, 99)} <= results.keys()
    middle = results["tiny_ttft_p50_ms"]
    assert (middle.value, middle.floor, middle.ratio) == pytest.approx((50.5, 101.0, 0.5))
    assert results["tiny_outputs_that_differ"].ok is False
    assert (results["tiny_requests"].value, results["tiny_outputs_that_differ_by_ties"].value) == (100, 0)


# --- the figure and the command line --------------------------------------------------------------------------------


def test_figure_is_the_same_for_the_same_answers(tmp_path: Path) -> None:
    """An SVG with title and caption, without a date and without random names, so that it can be compared."""
    pytest.importorskip("matplotlib")
    from benchmarks.replay_plot import draw  # noqa: PLC0415 - needs an extra

    answers = tuple(_answer(number / 1000) for number in range(1, 20))
    for name in ("one", "two"):
        draw(Play(tuple(_calls(19)), answers, answers), "the title", "the caption", tmp_path / name / "figure.svg")
    figures = [(tmp_path / name / "figure.svg").read_text() for name in ("one", "two")]
    assert figures[0] == figures[1]
    assert "<svg" in figures[0]


def test_replay_without_vllm_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM's environment is missing, the message names it, the command that builds it, and the variable."""
    monkeypatch.setenv("VLLM_VENV", str(tmp_path))
    with pytest.raises(SystemExit, match=r"make vllm-env.*VLLM_VENV"):
        main(["replay", "--json"])


def test_replay_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure's library is asked for before any server starts."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    monkeypatch.setenv("VLLM_VENV", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"\.\[plots\]"):
        main(["replay", "--json"])


def test_replay_options_name_the_figure_after_the_model() -> None:
    """The default figure is the one that the documentation shows."""
    assert replay_command.parse(["--model", "tiny"]).figure.parts[-3:] == ("docs", "figures", "replay-tiny.svg")
