"""Real SGLang on a real daemon: prompts are found again, and outputs are those of SGLang alone, whatever fails."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sglang.conftest import Prompts
from tests.sglang.sglang_process import PAGE_SIZE, Answer, SglangProcess, ended
from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.host_blocks import HostBlocks

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

#: A request with a daemon that does not answer: its deadlines (5 s each, few of them), and what a busy machine adds.
SLOW_S = 60


def stored(daemon: CacheDaemon, pages: int) -> Callable[[], None]:
    """Called later, waits until so many more pages are stored."""
    before = daemon.count("stored_blocks")
    return lambda: daemon.until(
        lambda stats: stats.counters.get("stored_blocks", 0) >= before + pages, f"{pages} pages stored"
    )


def test_prompt_is_found_when_sglang_has_dropped_it(
    sglang: SglangProcess, reference: SglangProcess, daemon: CacheDaemon, prompt: Prompts
) -> None:
    """All pages but that of the last token are loaded; logarithms of probabilities are the same to the last bit."""
    tokens, wait = prompt(8), stored(daemon, 8)
    (alone,) = reference.complete(tokens)
    (cold,) = sglang.complete(tokens)
    wait()
    sglang.forget()
    (warm,) = sglang.complete(tokens)
    assert (cold, warm) == (alone, alone)
    assert (cold.cached, warm.found) == (0, 7 * PAGE_SIZE)
    daemon.until_idle()


def test_prompt_is_found_behind_what_sglang_has_itself(
    sglang: SglangProcess, reference: SglangProcess, daemon: CacheDaemon, prompt: Prompts
) -> None:
    """A prompt whose beginning SGLang still has, and whose rest only the daemon has, is loaded from there on."""
    start, ends = prompt(4), [prompt(4, "one"), prompt(4, "other")]
    wait = stored(daemon, 12)
    for end in ends:
        sglang.complete(start + end)
    wait()
    sglang.forget()
    answers = [answer for end in ends for answer in sglang.complete(start + end)]
    assert answers == [answer for end in ends for answer in reference.complete(start + end)]
    assert [answer.found for answer in answers] == [7 * PAGE_SIZE, 3 * PAGE_SIZE]
    assert [answer.cached for answer in answers] == [7 * PAGE_SIZE, 7 * PAGE_SIZE]


def test_other_processes_find_prompts(
    sglang: SglangProcess, reference: SglangProcess, daemon: CacheDaemon, prompt: Prompts, model: Path, tmp_path: Path
) -> None:
    """A second SGLang with a device pool of another size finds what the first has stored, and the other way."""
    first, second = prompt(6, 1), prompt(6, 2)
    wait = stored(daemon, 6)
    sglang.complete(first)
    wait()
    with ended(SglangProcess(tmp_path / "log", model, daemon.run_dir, max_total_tokens=6144)) as other:
        other.wait_until_ready()
        (found,) = other.complete(first)
        wait = stored(daemon, 6)
        other.complete(second)
        wait()
        (back,) = sglang.complete(second)
    assert [found, back] == [*reference.complete(first), *reference.complete(second)]
    assert (found.found, back.found) == (5 * PAGE_SIZE, 5 * PAGE_SIZE)


def test_killed_sglang_finds_its_prompts(
    sglang: SglangProcess, reference: SglangProcess, daemon: CacheDaemon, prompt: Prompts
) -> None:
    """After SIGKILL of all its processes, the next SGLang loads what the last one has stored."""
    tokens, wait = prompt(8), stored(daemon, 8)
    sglang.complete(tokens)
    wait()
    sglang.stop()
    sglang.start()
    sglang.wait_until_ready()
    (warm,) = sglang.complete(tokens)
    assert [warm] == reference.complete(tokens)
    assert warm.found == 7 * PAGE_SIZE


def test_killed_daemon_costs_nothing_but_time(
    sglang: SglangProcess, reference: SglangProcess, daemon: CacheDaemon, prompt: Prompts
) -> None:
    """Requests finish while the daemon is dead; the next daemon has what was stored, and SGLang uses it again."""
    tokens, meanwhile = prompt(8), prompt(8, "meanwhile")
    wait = stored(daemon, 8)
    sglang.complete(tokens)
    wait()
    sglang.forget()
    daemon.kill()
    assert sglang.complete(meanwhile) == reference.complete(meanwhile)
    daemon.start()
    daemon.until_storage()
    assert found_in_the_end(sglang, reference, tokens) == 7 * PAGE_SIZE


def test_stopped_daemon_costs_deadlines(
    sglang: SglangProcess, reference: SglangProcess, daemon: CacheDaemon, prompt: Prompts
) -> None:
    """A daemon that does not answer holds each request up for its deadlines at most; when it goes on, it is used."""
    tokens, wait = prompt(8), stored(daemon, 8)
    sglang.complete(tokens)
    wait()
    sglang.forget()
    pid = daemon.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        prompts = [prompt(4, number) for number in range(4)]
        # Several at a time are computed together, and rounded as it comes.
        assert outputs(sglang.complete(*prompts)) == outputs(reference.complete(*prompts))
        assert time.monotonic() - began < SLOW_S
    finally:
        with contextlib.suppress(ProcessLookupError):  # if it takes long, the supervisor starts another daemon
            os.kill(pid, signal.SIGCONT)
    assert found_in_the_end(sglang, reference, tokens) == 7 * PAGE_SIZE


def outputs(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def found_in_the_end(sglang: SglangProcess, reference: SglangProcess, tokens: list[int]) -> int:
    """How much of a prompt is found once SGLang has tried the daemon again; until then the output is right, too."""
    deadline, alone = time.monotonic() + SLOW_S, reference.complete(tokens)
    while True:
        sglang.forget()
        answers = sglang.complete(tokens)
        assert answers == alone
        if answers[0].found or time.monotonic() > deadline:
            return answers[0].found


def test_damaged_page_is_computed(
    sglang: SglangProcess, reference: SglangProcess, daemon: CacheDaemon, prompt: Prompts
) -> None:
    """Pages before one that differs from what was stored are used, and what follows is computed."""
    tokens = prompt(8)
    with HostBlocks(daemon.pid) as host:
        before = {block.key for block in host.stored()}
        wait = stored(daemon, 8)
        sglang.complete(tokens)
        wait()
        sglang.forget()
        (mine,) = [block for block in host.stored() if block.key not in before and block.depth == 3]
        host.damage([mine])
    (answer,) = sglang.complete(tokens)
    assert [answer] == reference.complete(tokens)
    assert answer.found == 3 * PAGE_SIZE


def test_pages_come_back_from_disk(
    sglang: SglangProcess, reference: SglangProcess, daemon: CacheDaemon, prompt: Prompts
) -> None:
    """After an orderly end of the daemon, whose memory is gone then, the next one has the pages on disk."""
    tokens, wait = prompt(8), stored(daemon, 8)
    before = daemon.count("backed_up_blocks")
    sglang.complete(tokens)
    wait()
    daemon.until(lambda stats: stats.counters["backed_up_blocks"] == before + 8, "on disk")
    daemon.stop()
    daemon.start()
    daemon.until_storage()
    assert found_in_the_end(sglang, reference, tokens) == 7 * PAGE_SIZE
    assert daemon.count("prefetched_blocks") >= 7


def test_replaced_weights_find_nothing(
    sglang: SglangProcess,
    reference: SglangProcess,
    daemon: CacheDaemon,
    prompt: Prompts,
    model: Path,
    other_model: Path,
) -> None:
    """Weights replaced in memory make another model: the pages of the former are not found, and its own are its own."""
    tokens, wait = prompt(8), stored(daemon, 8)
    sglang.complete(tokens)
    wait()
    reference.load_weights(other_model)
    expected = reference.complete(tokens)
    reference.load_weights(model)
    assert expected != reference.complete(tokens)
    wait = stored(daemon, 8)
    sglang.load_weights(other_model)
    (first,) = sglang.complete(tokens)
    wait()
    sglang.forget()
    (second,) = sglang.complete(tokens)
    assert [first, second] == expected * 2
    assert (first.found, second.found) == (0, 7 * PAGE_SIZE)
    assert sglang.log().count("weights were replaced in memory") == 1
