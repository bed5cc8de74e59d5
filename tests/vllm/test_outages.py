"""A daemon that dies and a server that sleeps cost hits, never answers."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import pytest

from tests.vllm.cache_daemon import CHANGE_TIMEOUT_S, CacheDaemon
from tests.vllm.completions import Completion
from tests.vllm.conftest import Prompts
from tests.vllm.fleet import assert_same
from tests.vllm.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_daemon_is_killed_under_load(
    server: VllmServer, other: VllmServer, reference: VllmServer, daemon: CacheDaemon, prompt: Prompts
) -> None:
    """Requests finish as ever when the daemon is killed; the next one has what was stored. No server is restarted."""
    before = prompt(8, "before")
    server.complete(before)
    reference.complete(before)
    prompts = [prompt(8, number // 2) for number in range(24)]
    expected = [reference.complete(tokens, tokens=40) for tokens in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [
            pool.submit((server, other)[number % 2].complete, tokens, tokens=40)
            for number, tokens in enumerate(prompts)
        ]
        wait(answers, return_when=FIRST_COMPLETED)
        daemon.kill()
        assert results(answers) == expected
    daemon.start()
    daemon.until(lambda stats: stats.counters.get("sessions_opened", 0) >= 2, "connected to")  # there are old ones, too

    tokens = prompt(8, "afterwards")
    for each in (server, other):
        each.forget()
    for each in (server, other):  # of before the SIGKILL, also for the server that has never computed it
        hit = each.complete(before)
        assert hit.cached_tokens
        assert_same(hit, reference.complete(before))
    assert_same(server.complete(tokens), reference.complete(tokens))
    server.forget()
    for each in (server, other):
        assert_same(each.complete(tokens), reference.complete(tokens))


def test_server_sleeps_longer_than_its_session(
    server: VllmServer, other: VllmServer, reference: VllmServer, daemon: CacheDaemon, prompt: Prompts
) -> None:
    """A server that was stopped past its session's life goes on with right answers, and hits again."""
    prompts = [prompt(8, number) for number in range(12)]
    expected = [reference.complete(tokens, tokens=40) for tokens in prompts]
    expired = daemon.count("sessions_expired")
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(server.complete, tokens, tokens=40) for tokens in prompts]
        wait(answers, return_when=FIRST_COMPLETED)
        server.signal_all(signal.SIGSTOP)
        try:
            daemon.until(lambda stats: stats.counters.get("sessions_expired", 0) > expired, "expired")
            assert other.complete(prompts[0], tokens=40) == expected[0]
        finally:
            server.signal_all(signal.SIGCONT)
        assert results(answers) == expected
    daemon.until_sessions(2)

    tokens = prompt(8, "afterwards")
    server.forget()
    assert_same(server.complete(tokens), reference.complete(tokens))
    server.forget()
    assert_same(server.complete(tokens), reference.complete(tokens))


def test_daemon_hangs_under_load(
    server: VllmServer, reference: VllmServer, daemon: CacheDaemon, prompt: Prompts
) -> None:
    """While a daemon answers nobody, requests go on with right answers; when it does again, hits come back."""
    prompts = [prompt(8, number // 2) for number in range(12)]
    expected = [reference.complete(tokens, tokens=40) for tokens in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(server.complete, tokens, tokens=40) for tokens in prompts]
        wait(answers, return_when=FIRST_COMPLETED)
        pid = daemon.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            assert results(answers) == expected
            assert server.complete(prompts[0], tokens=40) == expected[0]
        finally:
            os.kill(pid, signal.SIGCONT)

    tokens = prompt(8, "afterwards")
    reference.complete(tokens)
    deadline = time.monotonic() + CHANGE_TIMEOUT_S
    answer = server.complete(tokens)
    while not answer.cached_tokens:
        assert time.monotonic() < deadline, "no hits any more"
        server.forget()
        answer = server.complete(tokens)
    assert_same(answer, reference.complete(tokens))


def results(answers: list[Future[Completion]]) -> list[Completion]:
    """All of them, in order."""
    return [answer.result() for answer in answers]
