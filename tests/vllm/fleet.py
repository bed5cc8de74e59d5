"""The servers that tests share: each starts when a test first needs it, several at the same time."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import Completion
from tests.vllm.server import VllmServer, ended

#: "three" is another adapter on each server.
ADAPTERS = {"a": {"one": "one", "two": "two", "three": "one"}, "b": {"one": "one", "two": "two", "three": "two"}}
#: The server without a connector, whose own prefix cache says what a hit must come to.
REFERENCE = "reference"


class Fleet:
    """Servers by name: `a` and `b` on one daemon, with the same model in two directories, and the reference."""

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
        settings += self._publishing(name)
        run_dir = None if name == REFERENCE else self._daemon.run_dir
        return VllmServer(self._directory, name, self._model(name), *settings, run_dir=run_dir)

    def events_of(self, name: str) -> str:
        """Where a server publishes its cache events; only `a` does."""
        return f"ipc://{self._directory}/{name}.events"

    def _publishing(self, name: str) -> list[str]:
        if name != "a":
            return []
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.events_of(name)}
        return [f"--kv-events-config={json.dumps(events)}"]

    def _model(self, name: str) -> Path:
        """The directory of a server's model: `b` has its own download of the same files."""
        model = self._models / "model"
        return shutil.copytree(model, self._directory / "download/model", dirs_exist_ok=True) if name == "b" else model

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
