"""A worker runs beside its device's memory node, if the machine has several and lets it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcached.worker.numa import stay_on_node

PROGRAM = """
import os, sys, threading
from pathlib import Path
from kvcached.worker.numa import stay_on_node
before = os.sched_getaffinity(0)
done = stay_on_node(int(sys.argv[1]), Path(sys.argv[2]))
seen = []
thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
thread.start()
thread.join()
print(done, *sorted(seen[0]), "of", *sorted(before))
"""


def machine(folder: Path, **nodes: str) -> Path:
    """What the kernel tells of nodes: their processors, as ``node1="4-7"``."""
    numbers = [name.removeprefix("node") for name in nodes]
    (folder / "online").write_text(",".join(numbers) + "\n")
    for name, processors in nodes.items():
        (folder / name).mkdir()
        (folder / name / "cpulist").write_text(f"{processors}\n")
    return folder


def stayed(node: int, nodes: Path) -> tuple[str, list[str], list[str]]:
    """Whether a new process says that it stays, where its threads may run, and where it might run before."""
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(node), str(nodes)], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    after, _, before = printed.partition(" of ")
    done, *allowed = after.split()
    return done, allowed, before.split()


def test_worker_stays_on_its_devices_node(tmp_path: Path) -> None:
    """Of two nodes, threads run on the processors of the device's that the process may use."""
    own, *others = map(str, sorted(os.sched_getaffinity(0)))

    done, allowed, _ = stayed(1, machine(tmp_path, node0=",".join(others), node1=f"{own},4000-4003"))

    assert (done, allowed) == ("True", [own])


@pytest.mark.parametrize(
    ("node", "nodes"),
    [
        pytest.param(0, {"node0": "0"}, id="one node"),
        pytest.param(-1, {"node0": "0", "node1": "1"}, id="node unknown"),
        pytest.param(2, {"node0": "0", "node1": "1"}, id="node that is not online"),
        pytest.param(1, {"node0": "0", "node1": "4000"}, id="no processor of the node is allowed"),
        pytest.param(1, {"node0": "0", "node1": ""}, id="node without processors"),
        pytest.param(1, {"node0": "0", "node1": "x"}, id="unreadable"),
    ],
)
def test_worker_runs_where_it_did(tmp_path: Path, node: int, nodes: dict[str, str]) -> None:
    """Nothing changes where there is nothing to choose, or no right to choose it."""
    done, allowed, before = stayed(node, machine(tmp_path, **nodes))

    assert (done, allowed) == ("False", before)


def test_machine_that_tells_of_no_nodes(tmp_path: Path) -> None:
    """A kernel without memory nodes is a machine with one."""
    assert not stay_on_node(0, tmp_path)
