"""`kvcached pin` and `unpin` against a real daemon: a system prompt outlives the load that would evict it."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from kvcached.cli.main import ExitCode, main
from kvcached_client import Client
from tests.daemon.conftest import RunningDaemon

SLOTS, BLOCK_SIZE = 16, 4
#: Four blocks, which is the quota, and a token.
SYSTEM_PROMPT = list(range(17))
LONGER = list(range(24))


def run(command: str, run_dir: Path, *arguments: str, tokens: list[int] = SYSTEM_PROMPT) -> Result:
    """Name a prompt with a salt to the daemon."""
    options = ["--run-dir", str(run_dir), "--tokens", "-", "--salt", "tenant", *arguments]
    return CliRunner().invoke(main, [command, "default", *options], input=json.dumps(tokens))


def store(client: Client, name: str, tokens: list[int]) -> None:
    """Compute what of a prompt is not cached."""
    chain = client.chain(tokens, salt="tenant")
    client.acquire(name, chain).finish(chain.token_count)


def hit(client: Client) -> int:
    """Blocks of the system prompt that a request with it would find."""
    return client.match(client.chain(LONGER, salt="tenant"))


def crowd_out(client: Client, name: str) -> None:
    """Store prompts until nothing else that may be evicted is left."""
    for number in range(2 * SLOTS // BLOCK_SIZE):
        first = (1 + ord(name) * SLOTS + number) * 1000
        store(client, f"{name} {number}", list(range(first, first + BLOCK_SIZE * BLOCK_SIZE)))


def test_pinned_prompt_is_hit_when_all_else_is_evicted(daemon: RunningDaemon) -> None:
    """While it is pinned, a prompt that nobody uses is hit whatever others store; unpinned, it goes as others do."""
    with Client.connect(daemon.run_dir, deadline_ms=5000) as client:
        store(client, "system", SYSTEM_PROMPT)
        result = run("pin", daemon.run_dir, "--json")
        said = json.loads(result.stdout)
        assert (result.exit_code, said["blocks"], said["device"], said["host"]) == (ExitCode.OK, 4, 4, 0)
        crowd_out(client, "a")
        assert hit(client) == 4

        assert run("unpin", daemon.run_dir).stdout == "the prompt is no longer pinned\n"
        crowd_out(client, "b")
        assert hit(client) == 0


def test_pin_over_the_quota_leaves_the_prompt_to_eviction(daemon: RunningDaemon) -> None:
    """More blocks than may be pinned are refused as the daemon words it, and none of them is kept."""
    with Client.connect(daemon.run_dir, deadline_ms=5000) as client:
        store(client, "system", LONGER)
        result = run("pin", daemon.run_dir, tokens=LONGER)
        assert (result.exit_code, result.stdout) == (ExitCode.UNHEALTHY, "")
        assert "6 more are over the quota of 4" in result.stderr
        crowd_out(client, "a")
        assert hit(client) == 0
