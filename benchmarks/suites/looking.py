"""Suite ``looking``: what a daemon loses at which everybody looks, against one at which nobody does."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Final

from benchmarks.pairs import paired_ratio
from benchmarks.programs import running
from benchmarks.result import Result, Target, judge
from benchmarks.turns_rig import BLOCKS, REQUESTS, TurnEngine, take_turns
from kvcached_client.protocol.zmtp import GREETING, SUBSCRIBER, subscribe

_WARM_UP_ROUNDS: Final = 4
#: Of each prompt: as many as stay cached.
_NEW_BLOCKS: Final = BLOCKS // 2
_HTTP_SOCKET: Final = "http.sock"
_RATIO_MAX: Final = Target("value", "<=", 1.01)
_SHARE_MAX: Final = Target("value", "<=", 0.01)
#: As long as the one who looks least often needs to look twice.
_IDLE_S: Final = 30.0
#: Who has asked and never reads.
_STALLED: Final = ("/tree.json", "/metrics")


def run(rounds: int) -> Iterator[Result]:
    """Requests at full load, by turns of thirty, half of whose blocks are new.

    `looked`: a page, a scraper, `top` and a router that reads events. `stalled`: a browser, a scraper and a router that
    have asked and read nothing.
    """
    with tempfile.TemporaryDirectory(prefix="kvcached-") as name, contextlib.ExitStack() as stack:
        plain = stack.enter_context(TurnEngine(Path(name) / "plain", ""))
        for kind in ("looked", "stalled"):
            place = Path(name) / kind
            tables = f'[http]\nlisten = "unix:{place / _HTTP_SOCKET}"\n[events]\n'
            with TurnEngine(place, tables) as engine, contextlib.ExitStack() as lookers:
                _look(engine.run_dir, place / _HTTP_SOCKET, lookers) if kind == "looked" else _stall(
                    engine.run_dir, place / _HTTP_SOCKET, lookers
                )
                yield from _compared(kind, plain, engine, rounds)
                if kind == "looked":
                    yield from _between_requests(plain, engine)


def _compared(kind: str, plain: TurnEngine, other: TurnEngine, rounds: int) -> Iterator[Result]:
    take_turns(plain, other, _WARM_UP_ROUNDS, _NEW_BLOCKS)
    before = plain.processor_s(), other.processor_s()
    ratios, plain_ns = take_turns(plain, other, rounds, _NEW_BLOCKS)
    used = plain.processor_s() - before[0], other.processor_s() - before[1]
    others_ns = [ratio * ns for ratio, ns in zip(ratios, plain_ns, strict=True)]
    pair = paired_ratio(others_ns, plain_ns)
    yield judge("looking", f"{kind}_ratio", pair.ratio, "ratio", target=_RATIO_MAX)
    yield judge("looking", f"{kind}_low_ratio", pair.low, "ratio")
    yield judge("looking", f"{kind}_high_ratio", pair.high, "ratio")
    yield judge("looking", f"{kind}_processor_ratio", used[1] / used[0], "ratio")
    yield judge("looking", f"{kind}_us", sum(plain_ns) / len(plain_ns) / REQUESTS / 1e3, "us")


def _between_requests(plain: TurnEngine, looked: TurnEngine) -> Iterator[Result]:
    """What those who look cost a daemon that nobody asks anything else: the part of a processor that requests lose."""
    before = plain.processor_s(), looked.processor_s()
    sleep(_IDLE_S)
    used = looked.processor_s() - before[1] - (plain.processor_s() - before[0])
    yield judge("looking", "looked_processor_share", used / _IDLE_S, "share", target=_SHARE_MAX)


def _look(run_dir: Path, http_socket: Path, stack: contextlib.ExitStack) -> None:
    stack.enter_context(running("lookers", ["benchmarks.lookers", str(run_dir), str(http_socket)], run_dir.parent))


def _stall(run_dir: Path, http_socket: Path, stack: contextlib.ExitStack) -> None:
    for path in _STALLED:
        browser = stack.enter_context(socket.socket(socket.AF_UNIX))
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        browser.connect(str(http_socket))
        browser.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    router = stack.enter_context(socket.socket(socket.AF_UNIX))
    router.connect(str(run_dir / "events.sock"))
    router.sendall(GREETING + SUBSCRIBER.ready + subscribe(b""))
