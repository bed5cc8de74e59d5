"""The servers that tests share: each starts when a test first needs it, several at the same time."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import Completion
from tests.vllm.server import VllmServer, ended

#: "three" is another adapter on each server.
ADAPTERS = {"a": {"one": "one", "two": "two", "three": "one"}, "b": {"one": "one", "two": "two", "three": "two"}}
#: The server without a connector, whose own prefix cache says what a hit must come to.
REFERENCE = "reference"


class Fleet:
    """Servers by name: `a` and `b` on one daemon, and the reference."""

    def __init__(self, directory: Path, models: Path, daemon: CacheDaemon) -> None:
        self._directory = directory
        self._models = models
        self._daemon = daemon
        self._servers: dict[str, VllmServer] = {}

    def servers(self, *names: str) -> list[VllmServer]:
        """Servers that are ready and, but for the reference, attached to the daemon."""
        for name in names:
            if name not in self._servers:
                self._servers[name] = self._start(name)
            elif self._servers[name].process.poll() is not None:
                self._servers[name].start()
        for name in names:
            self._servers[name].wait_until_ready()
        self._daemon.until_sessions(len(self._servers.keys() - {REFERENCE}))
        return [self._servers[name] for name in names]

    def _start(self, name: str) -> VllmServer:
        adapters = ADAPTERS.get(name, ADAPTERS["a"])
        modules = [f"{label}={self._models / 'adapters' / folder}" for label, folder in adapters.items()]
        settings = ["--enable-lora", "--max-loras=3", "--max-lora-rank=8", "--lora-modules", *modules]
        run_dir = None if name == REFERENCE else self._daemon.run_dir
        return VllmServer(self._directory, name, self._models / "model", *settings, run_dir=run_dir)

    def stop(self) -> None:
        """End all of them in order. The next one that is needed starts anew."""
        with contextlib.ExitStack() as stack:
            for server in self._servers.values():
                stack.enter_context(ended(server))
        self._servers.clear()


def assert_same(actual: Completion, expected: Completion) -> None:
    """The same tokens with the same log-probabilities, to the last bit, and as much of the prompt from a cache."""
    assert actual == expected
    assert actual.cached_tokens == expected.cached_tokens
