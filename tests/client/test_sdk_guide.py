from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, create_autospec

import pytest

import kvcached_client
from kvcached_client import Client, DeadlineExceeded, KvcachedError, Lease, LoadFailed, LoadTicket
from kvcached_client.cuda.streams import StreamFences
from kvcached_client.offload import OffloadClient
from kvcached_client.offload_shard import OffloadShard
from kvcached_client.protocol.engine import Acquire, Acquired, Commit, Header, Load, Loaded, Request
from kvcached_client.types import pack_ranges
from tests.client.fake_daemon import FakeDaemon
from tests.client.pools import LAYOUTS, mapped
from tests.project.daemon_process import clean_environment, running_daemon
from tests.project.source_tree import ROOT

ATTENTION = LAYOUTS["attention-layer_first"]
GUIDE = (ROOT / "docs/sdk.md").read_text()
REFERENCE = (ROOT / "docs/sdk-reference.md").read_text()
(CONFIG,) = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)
FRAGMENTS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
#: Each program with the output that the page shows next.
PROGRAMS = re.findall(r"```python complete\n(.*?)```.*?```text\n(.*?)```", GUIDE, re.DOTALL)
#: What the last program prints when it is run a second time.
(AGAIN,) = re.findall(r"```again\n(.*?)```", GUIDE, re.DOTALL)

#: What the fragments take for granted, and what shows that they did what the page says.
BEFORE = """
from kvcached_client import Client, DeadlineExceeded, LoadFailed, SessionGrant, map_pool
layout, scale_bytes, prompt = None, 12, range(10)
def compute_layer(layer, start, stop): pass
"""
AFTER = """
print(keys.shape, scales.shape, lease.capacity_tokens, lease.depth)
pool.close()
client.close()
"""


def outputs_of(programs: list[str], config: str, directory: Path) -> list[tuple[str, str]]:
    """What programs, run one after the other beside a daemon of their own, print to stdout and stderr."""
    path = directory / "tiny.toml"
    path.write_text(config)
    with running_daemon(path, directory / "run"):
        done = [
            subprocess.run(
                [sys.executable, "-c", program],
                cwd=ROOT,
                env={**clean_environment(), "KVCACHED_RUN_DIR": str(directory / "run")},
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            for program in programs
        ]
    return [(each.stdout, each.stderr) for each in done]


def output_of(program: str, config: str, directory: Path) -> tuple[str, str]:
    """What a program prints to stdout and stderr, beside a daemon of its own."""
    (output,) = outputs_of([program], config, directory)
    return output


def test_guide_has_programs_and_shows_their_output() -> None:
    """Every block marked complete is followed by the output that it is compared with."""
    assert len(PROGRAMS) == GUIDE.count("```python complete") == GUIDE.count("```text") >= 1


@pytest.mark.full
@pytest.mark.parametrize(("program", "expected"), PROGRAMS, ids=range(len(PROGRAMS)))
def test_guide_program_prints_what_the_page_shows(program: str, expected: str, tmp_path: Path) -> None:
    """A complete program of the guide, beside a daemon with the guide's configuration, prints what the page says."""
    assert output_of(program, CONFIG, tmp_path) == (expected, "")


@pytest.mark.full
def test_tutorial_prints_what_the_page_shows(tmp_path: Path) -> None:
    """The tutorial's programs, run in turn beside one daemon and the last one twice, print what the page shows."""
    programs = [program for program, _ in PROGRAMS]
    expected = [(output, "") for _, output in PROGRAMS]

    assert outputs_of([*programs, programs[-1]], CONFIG, tmp_path) == [*expected, (AGAIN, "")]


def test_guide_has_a_program_for_event_loops(tmp_path: Path) -> None:
    """The program for event loops prints what its last line says."""
    (program,) = re.findall(r"```python asyncio\n(.*?)```", GUIDE, re.DOTALL)
    expected = program.rstrip().rpartition("# ")[2]

    assert output_of(program, CONFIG, tmp_path) == (f"{expected}\n", "")


def test_guide_fragments_run_in_their_order(tmp_path: Path) -> None:
    """The guide's fragments, one after the other, make a session, map a pool with scales and get a lease."""
    config = CONFIG + "scale_bytes = 12\n"

    assert output_of(BEFORE + "".join(FRAGMENTS) + AFTER, config, tmp_path) == ("(32, 4, 1, 8) (32, 12) 80 2\n", "")


def test_guide_fragment_for_devices_names_calls_that_exist() -> None:
    """The fragment about tensors on a CUDA device passes a mark of the current stream to both copies."""
    (fragment,) = re.findall(r"```python cuda\n(.*?)```", GUIDE, re.DOTALL)
    shard, torch = create_autospec(OffloadShard, instance=True), Mock()
    exec(fragment, {"shard": shard, "torch": torch, "job": None})  # noqa: S102 - the guide is ours

    shard.mark.assert_called_once_with(torch.cuda.current_stream().cuda_stream)
    shard.store.assert_called_once_with(None, after=shard.mark.return_value)
    shard.load.assert_called_once_with(None, after=shard.mark.return_value)


def test_guide_fragment_for_streams_names_calls_that_exist() -> None:
    """The fragment about streams takes a fence after the launches, and commits and releases under it."""
    (fragment,) = re.findall(r"```python streams\n(.*?)```", GUIDE, re.DOTALL)
    engine = Mock(fences=create_autospec(StreamFences, instance=True), lease=create_autospec(Lease, instance=True))
    engine.fences.next.return_value = 7
    names = {"StreamFences": lambda _: engine.fences, "pool": Mock(), "stream": Mock(), "stop": 8}
    exec(fragment, {**names, **{name: getattr(engine, name) for name in ("launch_kernels", "lease", "client")}})  # noqa: S102 - the guide is ours

    assert [name for name, *_ in engine.mock_calls][:2] == ["launch_kernels", "fences.next"]
    engine.lease.commit.assert_called_once_with(8, fence=7)
    engine.lease.release.assert_called_once_with(fence=7)
    assert engine.client.signal_fence.call_count == 2


class ComputedLayers:
    """The engine of the guide's fragment: what it computes, and what the worker does meanwhile."""

    def __init__(self, daemon: FakeDaemon, end: str) -> None:
        self.done: list[tuple[int, int]] = []
        self._daemon = daemon
        self._end = end
        daemon.progress.start(3, 9)
        daemon.progress.finish_layers(3)

    def __call__(self, layer: int, start: int, stop: int) -> None:
        self.done.append((layer, start))
        if len(self.done) == 1 and self._end == "fail":
            self._daemon.progress.fail(3)
        else:
            self._daemon.progress.finish_layers(3)


@pytest.mark.parametrize(
    ("end", "hit", "computed", "committed"),
    [
        ("succeed", 2, [(0, 8), (1, 8), (2, 8)], 2),
        ("succeed", 1, [(0, 8), (1, 8), (2, 8), (0, 4), (1, 4), (2, 4)], 1),
        ("fail", 1, [(0, 8), (0, 4), (1, 4), (2, 4)], 1),
        ("fail", 2, [(0, 8), (0, 8), (1, 8), (2, 8)], 2),
    ],
    ids=["arrives", "turns out shorter", "fails", "fails here only"],
)
def test_guide_prefill_computes_what_did_not_arrive(
    daemon: FakeDaemon,
    memory: list[int],
    end: str,
    hit: int,
    computed: list[tuple[int, int]],
    committed: int,
) -> None:
    """The guide's layer-wise prefill computes each layer when its hit is there, and again from a shorter hit."""
    replacements: list[bytes] = [pack_ranges([(20, 2 - hit)] if hit < 2 else [])]

    def script(request: Request, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
        if isinstance(request, Acquire):
            acquired = Acquired(id=request.id, lease=7, hit=2, ready=1, loads=(LoadTicket(9, 3),))
            return acquired, [pack_ranges([(40, 2)]), pack_ranges([(10, 1)])]
        return (Loaded(id=request.id, hit=hit), replacements) if isinstance(request, Load) else None

    daemon.script = script
    engine = ComputedLayers(daemon, end)
    (fragment,) = [each for each in FRAGMENTS if "wait_layer" in each]
    with Client.connect(daemon.run_dir, heartbeat=False) as client, mapped(daemon, ATTENTION, memory) as pool:
        lease = client.acquire("a", client.chain(range(12)))
        names = {"pool": pool, "compute_layer": engine, "LoadFailed": LoadFailed, "DeadlineExceeded": DeadlineExceeded}
        exec(fragment.replace("prefill(lease, 8)", "prefill(lease, 12)"), {**names, "lease": lease})  # noqa: S102
    (commit,) = daemon.of(Commit)
    assert isinstance(commit, Commit)
    assert (engine.done, commit.start) == (computed, committed)


def test_guide_says_what_to_do_for_every_error() -> None:
    """The reference's table names exactly the exceptions that an engine can catch, not bases that are never raised."""
    names = (getattr(kvcached_client, name) for name in kvcached_client.__all__)
    kinds = [kind for kind in names if isinstance(kind, type) and issubclass(kind, KvcachedError)]
    errors = {kind.__name__ for kind in kinds} - {"KvcachedError", "RequestError", "TransportError"}
    (table,) = re.findall(r"\n\| error \|.*?\n\n", REFERENCE, re.DOTALL)
    first_cells = "".join(row.split("|")[1] for row in table.splitlines()[3:] if row)

    assert set(re.findall(r"`(\w+)`", first_cells)) == errors


@pytest.mark.parametrize("described", [OffloadClient, OffloadShard, Lease, StreamFences])
def test_reference_names_every_method(described: type) -> None:
    """Every public method of a class is in the reference's part about it; a call that waits stands for its `begin_`."""
    heading = {Lease: "## `Lease`", StreamFences: "## Work on CUDA streams"}.get(
        described, f"### `{described.__name__}`"
    )
    part = re.split(r"\n##+ ", REFERENCE.split(f"\n{heading}\n")[1])[0]
    methods = {name.removeprefix("begin_") for name in vars(described) if not name.startswith("_")}

    named = {name.removeprefix("begin_") for name in re.findall(r"`(?:\w+\.)?(\w+)", part)}
    assert methods <= named
