"""`kvcached explain` against a real daemon: a prompt of the client's own, by its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from kvcached.cli.main import main
from kvcached_client import Client
from tests.daemon.conftest import RunningDaemon

TOKENS = list(range(22))


def explain(run_dir: Path, *arguments: str) -> dict[str, Any]:
    command = ["explain", "--json", "--run-dir", str(run_dir), "--tokens", "-", *arguments]
    result = CliRunner().invoke(main, command, input=json.dumps(TOKENS))
    assert result.exit_code == 0, result.output
    (entry,) = json.loads(result.stdout)["explanations"]
    return {**entry, "variants": {each["what"]: each["hit"] for each in entry["variants"]}}


def test_explain_computes_the_keys_that_an_engine_sends(daemon: RunningDaemon) -> None:
    """What was stored under a salt and an adapter is found with both; else the name to leave out is told."""
    with Client.connect(daemon.run_dir, deadline_ms=5000) as client:
        for request, salt, lora in (("one", "tenant", "sql"), ("two", "", "")):
            chain = client.chain(TOKENS[: 4 * len(request)], lora=lora, salt=salt)
            client.acquire(request, chain).finish(chain.token_count)

        told = explain(daemon.run_dir, "--salt", "tenant", "--lora", "sql")
        assert (told["hit"], told["blocks"], told["reason"]) == (3, 5, "never_stored")
        assert explain(daemon.run_dir, "--lora", "other")["variants"] == {"without the adapter": 3}
