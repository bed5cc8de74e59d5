"""The commands for people, on a real server: why its prompts missed, and whether its environment is in order."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvcached.cli.main import main
from kvcached_client.vllm.keys import VllmHashing, block_keys
from tests.events.router import Router
from tests.project.daemon_process import clean_environment
from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE
from tests.vllm.conftest import Prompts
from tests.vllm.server import CONNECTOR, VllmServer, ended, interpreter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

HASHING = "--prefix-caching-hash-algo=sha256_cbor"


@pytest.fixture(scope="module")
def own_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheDaemon]:
    """A daemon for one server, which tells routers tokens."""
    daemon = CacheDaemon(
        tmp_path_factory.mktemp("tools"),
        tables="[events]\nblock_hashes = 'bytes'\n[[events.namespace]]\nlabel = 'model*'\ntoken_ids = true\n",
    )
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models: Path, own_daemon: CacheDaemon) -> Iterator[VllmServer]:
    """A server whose block hashes anybody can compute."""
    folder = tmp_path_factory.mktemp("server")
    with ended(VllmServer(folder, "cbor", models / "model", HASHING, run_dir=own_daemon.run_dir)) as server:
        yield server.wait_until_ready()


def explain(daemon: CacheDaemon, prompt: list[int], *arguments: str) -> dict[str, Any]:
    """What is told of a prompt in the server's namespace."""
    command = ["explain", "--json", "--run-dir", str(daemon.run_dir), "--engine", "vllm", "--tokens", "-", *arguments]
    result = CliRunner().invoke(main, command, input=json.dumps(prompt))
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["explanations"]
    return next(each for each in found if each["label"] != "doctor")


def test_explain_finds_what_a_server_stored(server: VllmServer, own_daemon: CacheDaemon, prompt: Prompts) -> None:
    """Keys computed without vLLM are those of its blocks: all of a prompt is found, and where another one parts."""
    first = prompt(5)
    second = first[: 3 * BLOCK_SIZE] + prompt(2, "another end")
    server.complete(first)
    server.forget()  # when it may, its stores are over

    told = explain(own_daemon, first)
    assert (told["label"], told["hit"], told["reason"]) == ("model float32 tp1", 4, "last_token")
    told = explain(own_daemon, second)
    assert (told["hit"], told["reason"], told["others"]) == (3, "never_stored", 1)


def test_routers_learn_the_tokens_of_a_server(server: VllmServer, own_daemon: CacheDaemon, prompt: Prompts) -> None:
    """Routers get the tokens of blocks that vLLM has stored, also from the next daemon, but none behind a salt."""
    plain, salted = prompt(4, "told"), prompt(3, "untold")
    server.complete(plain)
    server.complete(salted, cache_salt="tenant")
    server.forget()
    told = {key: plain[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE] for at, key in enumerate(_keys(plain))}
    untold = {key: list[int]() for key in _keys(salted, salt="tenant")}

    assert known(own_daemon, {*told, *untold}) == told | untold
    own_daemon.kill()
    own_daemon.start()
    assert known(own_daemon, {*told, *untold}) == told | untold


def _keys(tokens: list[int], salt: str = "") -> list[bytes]:
    packed = block_keys(tokens, VllmHashing(BLOCK_SIZE), salt=salt)
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


def known(daemon: CacheDaemon, keys: set[bytes]) -> dict[bytes, list[int]]:
    """The tokens that a router which starts now knows of these blocks, as far as it knows the blocks."""
    router = Router.of(daemon.run_dir)
    try:
        while router.take(500) or router.last < 0:
            pass
        ((tier, held),) = router.solid().items()
        return {key: router.tokens[tier, key] for key in keys & held}
    finally:
        router.close()


def test_explain_finds_a_forgotten_salt(server: VllmServer, own_daemon: CacheDaemon, prompt: Prompts) -> None:
    """A prompt that was stored under a salt is found with it; one without is found where the salt is left out."""
    salted, plain = prompt(3, "salted"), prompt(3, "plain")
    server.complete(salted, cache_salt="tenant")
    server.complete(plain)
    server.forget()

    assert explain(own_daemon, salted, "--salt", "tenant")["hit"] == 2
    told = explain(own_daemon, plain, "--salt", "tenant")
    assert (told["hit"], [(each["what"], each["hit"]) for each in told["variants"]]) == (0, [("without the salt", 2)])


def test_doctor_finds_nothing_wrong(server: VllmServer, own_daemon: CacheDaemon, models: Path) -> None:
    """The environment and the arguments that these tests use pass every check."""
    flags = ["serve", str(models / "model"), "--kv-transfer-config", json.dumps(CONNECTOR), HASHING]
    command = [
        "doctor",
        "--json",
        "--python",
        str(interpreter()),
        "--run-dir",
        str(own_daemon.run_dir),
        "--",
        *flags,
    ]
    result = CliRunner().invoke(main, [*command, f"--block-size={BLOCK_SIZE}"])

    findings = {finding["check"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert (result.exit_code, [each for each in findings.values() if each["level"] != "ok"]) == (0, [])
    assert findings.keys() >= {"vllm", "connector", "round trip", "hashes", "vllm flags", "layout"}


#: Checks the interface of the vLLM that is there, and again without a hook and an attribute.
CHECK_INTERFACE = """
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.block_pool import BlockPool
from kvcached_client.vllm.interface import check_interface

check_interface(vllm.__version__)
del KVConnectorBase_V1.take_events, BlockPool.touch
try:
    check_interface(vllm.__version__)
except RuntimeError as error:
    print(error)
"""


def test_interface_of_vllm_is_checked(tmp_path: Path) -> None:
    """The vLLM of these tests passes the check for newer versions; without parts that the connector needs it fails."""
    command = [str(interpreter()), "-c", CHECK_INTERFACE]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == [
        "- vLLM has no take_events, and does not call it",
        "- BlockPool has no touch",
    ]
