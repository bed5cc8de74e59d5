"""`configs/compose.yaml` under a Docker engine, by `make docker`: an image that is built, containers that are replaced.

The image of vLLM is not pulled: an engine from the tests is in its place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.project.source_tree import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]

DOCKER = shutil.which("docker") or "docker"
PROJECT = "kvcached-test"
FILES = ("--file", str(ROOT / "configs/compose.yaml"), "--file", str(Path(__file__).parent / "engine.yaml"))
INSTANCE = "69" * 16
BLOCKS = 20
#: The daemon's user in the image, by which the keeper knows its supervisor.
USER = 10001


def docker(*arguments: str, **environment: str) -> str:
    """What a command prints; what it says of an error is in the failure."""
    done = subprocess.run(
        [DOCKER, *arguments],
        env={**os.environ, "SOURCE": str(ROOT), **environment},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def compose(*arguments: str, tag: str = "one") -> str:
    return docker("compose", "--project-name", PROJECT, *FILES, *arguments, KVCACHED_TAG=tag)


def kvcached(*arguments: str) -> str:
    """A command in the daemon's container."""
    return compose("exec", "-T", "kvcached", "kvcached", *arguments)


def log() -> str:
    return compose("logs", "--no-log-prefix", "kvcached")


def state(service: str) -> Any:
    (found,) = json.loads(docker("inspect", f"{PROJECT}-{service}-1"))
    return found


class EngineInContainer:
    """A process of an engine in its own container, which speaks in lines."""

    def __init__(self) -> None:
        words = f"python -m tests.daemon.offload_process scheduler /run/kvcached {INSTANCE} 1 4096 0".split()
        self._process = subprocess.Popen(
            [DOCKER, "exec", "--interactive", f"{PROJECT}-engine-1", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.session = self._hear()

    def store(self, name: str) -> None:
        self._ask(f"prepare {name} {BLOCKS}")
        assert self._ask("copy") == "begins"
        assert self._hear() == "done"

    def hit(self, name: str) -> int:
        return int(self._ask(f"hit {name} {BLOCKS}"))

    def reconnect(self) -> None:
        self.session = self._ask("reconnect")

    def end(self) -> None:
        """It says goodbye, and its process ends."""
        assert self._ask("bye") == "bye"
        assert self._process.communicate(timeout=30)[0] == ""
        assert self._process.returncode == 0

    def cut_off(self) -> None:
        """Do without it: if it still runs, it ends with its container."""
        with self._process:
            self._process.kill()

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the engine has ended"
        return line


@pytest.fixture(scope="module", autouse=True)
def images() -> None:
    """The image, by the command of the documents, under two tags."""
    docker("build", "--tag", "kvcached-test:one", str(ROOT))
    docker("tag", "kvcached-test:one", "kvcached-test:two")


@pytest.fixture
def node() -> Iterator[None]:
    """Keeper, daemon and the container of the engine, from nothing, and healthy."""
    compose("down", "--volumes", "--timeout", "5")
    try:
        compose("up", "--detach", "keeper", "engine")
        compose("up", "--detach", "--wait", "--no-deps", "kvcached")  # the others have no health to wait for
        yield
    finally:
        compose("down", "--volumes", "--timeout", "5")


@contextmanager
def engine() -> Iterator[EngineInContainer]:
    """A process of an engine, which ends in order if the test does."""
    running = EngineInContainer()
    try:
        yield running
        running.end()
    finally:
        running.cut_off()


def test_image_has_a_compiled_core_and_a_user_of_its_own() -> None:
    """Nothing in it runs as root, and every backend and what encrypts is there."""
    run = ("run", "--rm", "--network", "none", "--read-only", "--cap-drop", "ALL")
    program = (
        "import os, json, kvcached.core.cache as cache, redis, obstore, cryptography, nacl, prometheus_client;"
        "print(json.dumps([os.getuid(), cache.__file__]))"
    )
    user, core = json.loads(docker(*run, "--entrypoint", "python", "kvcached-test:one", "-c", program))

    assert user == USER
    assert core.endswith(".so")
    assert docker(*run, "kvcached-test:one", "version").strip()


@pytest.mark.usefixtures("node")
def test_health_of_the_image_is_that_of_the_daemon() -> None:
    """Docker calls the container healthy, and unhealthy while the daemon cannot serve."""
    assert state("kvcached")["State"]["Health"]["Status"] == "healthy"
    assert kvcached("health")


@pytest.mark.usefixtures("node")
def test_upgrade_keeps_every_block_and_every_engine() -> None:
    """The container is another one, of the new tag; the keeper is not; an engine that lived through it goes on."""
    with engine() as running:
        running.store("a")
        keeper, before = state("keeper")["Id"], state("kvcached")
        compose("up", "--detach", "--wait", "--no-deps", "kvcached", tag="two")
        after = state("kvcached")

        assert (after["Config"]["Image"], state("keeper")["Id"]) == ("kvcached-test:two", keeper)
        assert after["Id"] != before["Id"]
        assert f"{BLOCKS} blocks of the host pool, 0 blocks of device pools, 1 living engines" in log()
        running.reconnect()
        assert running.hit("a") == BLOCKS


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("command", ["restart", "kill"])
def test_container_that_is_started_again_finds_its_blocks(command: str) -> None:
    """After a restart, which applies a changed configuration, and after all its processes were killed at once."""
    with engine() as running:
        running.store("a")
    compose(command, "kvcached")
    compose("up", "--detach", "--wait", "--no-deps", "kvcached")
    with engine() as running:
        assert running.hit("a") == BLOCKS


@pytest.mark.usefixtures("node")
def test_new_keeper_is_given_everything() -> None:
    """A keeper that dies is started again by Docker, and keeps the memory over the next upgrade."""
    with engine() as running:
        running.store("a")
    compose("up", "--detach", "--force-recreate", "--no-deps", "keeper")
    while not re.search(r"the keeper is there, and has [1-9]\d* descriptors", log()):
        pass
    compose("up", "--detach", "--wait", "--no-deps", "kvcached", tag="two")
    with engine() as running:
        assert running.hit("a") == BLOCKS
