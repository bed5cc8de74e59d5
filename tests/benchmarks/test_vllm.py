"""What the suite vllm stands on, as far as it runs without vLLM."""

from __future__ import annotations

import json
import sys
import textwrap
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import vllm_child
from benchmarks.__main__ import main
from benchmarks.attached_rig import PageShape
from benchmarks.hook_clock import HookClock
from benchmarks.local_model import MODELS
from benchmarks.pairs import mean_difference, paired_ratio
from benchmarks.scheduler_rig import BLOCK_SIZE, SchedulerRig
from benchmarks.suites import DEFAULT_SUITES, SUITES
from benchmarks.vllm_child import running_engine
from benchmarks.vllm_copies import copies
from benchmarks.vllm_hooks import made_up_steps
from benchmarks.vllm_server import VllmServer
from kvcached_client.vllm.scheduling.scheduler import GENERATED_BLOCKS_PER_OFFER


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that has this Python, and no vLLM."""
    folder = tmp_path / "environment"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setenv("VLLM_VENV", str(folder))
    return folder


def test_suite_is_not_run_unless_asked_for() -> None:
    """The default suites need nothing more than the development environment, and wait for nothing."""
    asked_for = {"cuda", "door", "faults", "floods", "sglang", "vllm", "vllm-queue", "vllm-hits"}
    assert set(SUITES) - set(DEFAULT_SUITES) == asked_for


def test_suite_without_vllm_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM's environment is missing, nothing is measured; the message names the command that builds it."""
    monkeypatch.setenv("VLLM_VENV", str(tmp_path))
    with pytest.raises(SystemExit, match="make vllm-env"):
        main(["vllm", "--rounds", "10"])


def test_paired_ratio_covers_what_its_pairs_say() -> None:
    """The ratio is the geometric mean of the pairs' ratios; the interval holds it, and closes where all agree."""
    ratio, low, high = paired_ratio([2.0, 8.0, 4.0, 4.0], [1.0, 1.0, 1.0, 1.0])
    assert ratio == pytest.approx(4.0)
    assert 2.0 <= low < ratio < high <= 8.0
    assert paired_ratio([3.0] * 9, [2.0] * 9) == pytest.approx((1.5, 1.5, 1.5))


def test_mean_difference_covers_what_its_pairs_say() -> None:
    """The difference is the mean of the pairs' differences; the interval holds it, and closes where all agree."""
    mean, low, high = mean_difference([2.0, 8.0, 5.0, 5.0], [1.0, 1.0, 1.0, 1.0])
    assert mean == pytest.approx(4.0)
    assert 1.0 <= low < mean < high <= 7.0
    assert mean_difference([3.0] * 9, [5.0] * 9) == pytest.approx((-2.0, -2.0, -2.0))
    with pytest.raises(ValueError, match="no pairs"):
        mean_difference([], [])


def test_paired_ratio_needs_whole_pairs() -> None:
    """No pairs, or a value without its floor, give no ratio."""
    with pytest.raises(ValueError, match="no pairs"):
        paired_ratio([], [])
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0], [1.0, 2.0])


def test_made_up_requests_store_every_block_once() -> None:
    """In as many steps as a block has tokens every request fills one block, and they are offered some at a time."""
    rig = SchedulerRig(8)
    before = rig.offered_blocks
    assert all(rig.step_ns() > 0 for _ in range(2 * GENERATED_BLOCKS_PER_OFFER * BLOCK_SIZE))
    assert rig.offered_blocks - before == 2 * GENERATED_BLOCKS_PER_OFFER * 8


def test_made_up_steps_have_their_target() -> None:
    """Each number of running requests has a mean with the promised limit, and a median."""
    results = {result.metric: result for result in made_up_steps(2)}
    means = {f"made_up_step_{running}_running_us" for running in (1, 8, 64)}
    assert {name for name, result in results.items() if result.target == "value <= 100"} == means
    assert all(result.value > 0 for result in results.values())


def test_copies_have_every_promised_metric() -> None:
    """On few small blocks, stores and loads arrive; each has its ratio to one large copy, the worst is told first."""
    results = {result.metric: result for result in copies(2, (PageShape("few", layers=3, page_bytes=4096, blocks=8),))}
    kinds = {f"copied_over_memcpy_{kind}_few_ratio" for kind in ("store", "load", "load_unverified")}
    assert {name for name, result in results.items() if result.target} == {*kinds, "copied_over_memcpy_ratio"}
    assert results["copied_over_memcpy_ratio"].value == min(results[name].value for name in kinds)


# --- engines and servers as child processes -------------------------------------------------------------------------


def test_engine_child_answers_line_by_line(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and answers go over stdin and stdout as JSON lines; an engine that ends tells why by its log."""
    script = tmp_path / "engine.py"
    script.write_text(
        textwrap.dedent("""
            import json, sys
            print("{}", flush=True)
            for line in sys.stdin:
                command = json.loads(line)
                if not command["prompts"]:
                    sys.exit("no such luck")
                settings = json.loads(sys.argv[1])
                connector = settings.get("kv_transfer_config", {}).get("kv_connector")
                print(json.dumps({"command": command, "connector": connector}), flush=True)
        """)
    )
    monkeypatch.setattr(vllm_child, "_SCRIPT", script)
    with running_engine("a", tmp_path, tmp_path, cache_bytes=1, sequences=1, run_dir=None) as engine:
        answer = engine.generate([[1, 2]], 3)
        assert answer == {"command": {"prompts": [[1, 2]], "tokens": 3}, "connector": None}
        with pytest.raises(RuntimeError, match="no such luck"):
            engine.generate([], 1)
    with running_engine("b", tmp_path, tmp_path, cache_bytes=1, sequences=1, run_dir=tmp_path) as engine:
        assert engine.generate([[1]], 1)["connector"] == "KvcachedConnector"
    times = tmp_path / "times"
    with running_engine(
        "c", tmp_path, tmp_path, cache_bytes=1, sequences=1, run_dir=tmp_path, timed_hooks=times
    ) as engine:
        assert engine.generate([[1]], 1)["connector"] == "TimedConnector"
    assert {path.name for path in (tmp_path / "modules").rglob("*.py")} == set(vllm_child._TIMED_FILES)
    assert all(path.is_file() for path in (tmp_path / "modules").rglob("*.py"))


_SERVER = """
    import socket, sys
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    if "--kv-transfer-config" in arguments:
        sys.exit("no connector here")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(arguments["--uds"])
        print("Application startup complete.", flush=True)
        server.listen()
        while True:
            server.accept()
"""


@pytest.fixture
def stub(environment: Path, tmp_path: Path) -> Path:
    """A folder from which ``-m vllm.entrypoints.openai.api_server`` is a few lines."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(textwrap.dedent(_SERVER))
    return tmp_path


def test_server_is_up_within_its_block(stub: Path) -> None:
    """A server takes connections inside the block, and is gone after it."""
    with VllmServer("a", stub, MODELS["tiny"], stub, device_blocks=8, run_dir=None) as server:
        assert server.wait_until_ready().is_socket()
    assert "startup complete" in (stub / "a.log").read_text()


def test_server_that_does_not_start_tells_why(stub: Path) -> None:
    """One that ends before it is ready is an error, with the end of its log."""
    with (
        VllmServer("a", stub, MODELS["tiny"], stub, device_blocks=8, run_dir=stub) as server,
        pytest.raises(RuntimeError, match="no connector here"),
    ):
        server.wait_until_ready()


# --- the clock of hooks ---------------------------------------------------------------------------------------------


class _Connector:
    def __init__(self) -> None:
        self.called: list[str] = []

    @property
    def requires_kv_delivery(self) -> bool:
        raise AssertionError("a property is no hook")

    def build_connector_meta(self, step: object) -> str:
        self.take_events()
        return "meta"

    def take_events(self) -> None:
        self.called.append("take_events")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """What a clock writes. Every look at the time is 10 ns later."""
    now = iter(range(0, 10_000, 10))
    monkeypatch.setattr("benchmarks.hook_clock.perf_counter_ns", lambda: next(now))
    return StringIO()


def _read(lines: StringIO) -> list[Any]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def _step(running: int, *, new: int = 0, resumed: int = 0) -> SimpleNamespace:
    cached = SimpleNamespace(resumed_req_ids=set(range(resumed)))
    return SimpleNamespace(
        scheduled_new_reqs=list(range(new)),
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=dict.fromkeys(range(running), 1),
    )


def test_hook_clock_tells_steps_apart(lines: StringIO) -> None:
    """A line for each step says how many requests it has, and whether it admits or resumes one."""
    connector = _Connector()
    HookClock(connector, lines)
    for step in (_step(2, new=2), _step(2), _step(1), _step(2, resumed=1)):
        assert connector.build_connector_meta(step) == "meta"
        connector.take_events()
    connector.take_events()  # of no step
    assert [(line["running"], line["admits"]) for line in _read(lines)] == [
        (2, True),
        (2, False),
        (1, False),
        (2, True),
    ]


def test_hook_clock_counts_nested_hooks_once(lines: StringIO) -> None:
    """A hook that calls another one counts from its start to its end, and ends no step before it is over."""
    connector = _Connector()
    HookClock(connector, lines)
    connector.build_connector_meta(_step(1))
    connector.take_events()
    assert [line["spent_ns"] for line in _read(lines)] == [30 + 10]
    assert connector.called == ["take_events"] * 2
