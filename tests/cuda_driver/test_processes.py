from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cuda_driver.device import GRANULE_BYTES, live_granules, settings
from tests.cuda_driver.peer import ROOT, Peer
from tests.cuda_driver.trace import calls, ran, read

NEW_BYTE, FREED_BYTE = 0xDB, 0xDD
StartPeer = Callable[..., Peer]


@pytest.fixture
def environment(library: Path, device: Path, tmp_path: Path) -> dict[str, str]:
    """Of a process that finds the fake driver where it looks for the real one."""
    values = settings(directory=device, delay_us=1000, register_us_per_mib=0, memory_mib=64, trace=tmp_path / "trace")
    return {**values, "LD_LIBRARY_PATH": str(library.parent)}


@pytest.fixture
def start_peer(environment: dict[str, str]) -> Iterator[StartPeer]:
    """Start another process on the device."""
    peers: list[Peer] = []

    def start(**variables: str) -> Peer:
        peers.append(Peer({**environment, **variables}))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()


def test_importer_goes_on_when_the_exporter_is_killed(start_peer: StartPeer, device: Path, tmp_path: Path) -> None:
    """Memory outlives the process that made it, byte for byte, and is freed when the last process is killed."""
    exporter, importer = start_peer(), start_peer()
    made = exporter.ask("make", byte=0x5A)
    importer.ask("take", made["descriptor"])
    exporter.kill()

    assert importer.ask("read") == {"bytes": [0x5A, 0x5A]}
    assert live_granules(device) == 1
    importer.kill()
    assert live_granules(device) == 0
    records = read(tmp_path / "trace")
    (export,) = calls(records, "cuMemExportToShareableHandle")
    (import_,) = calls(records, "cuMemImportFromShareableHandle")
    assert (export.process, import_.process) == (exporter.process.pid, importer.process.pid)
    assert export.order < import_.order
    assert {record.process for record in ran(records, "copy")} == {importer.process.pid}


def test_descriptor_alone_keeps_the_memory(start_peer: StartPeer, device: Path) -> None:
    """A process that never loads CUDA keeps device memory by its descriptor, even while that is sent over a socket."""
    exporter = start_peer()
    descriptor = exporter.ask("make", byte=0x17)["descriptor"]
    exporter.kill()
    assert live_granules(device) == 1

    sender, receiver = socket.socketpair()
    socket.send_fds(sender, [b"memory"], [descriptor])
    os.close(descriptor)
    assert live_granules(device) == 1
    (received,) = socket.recv_fds(receiver, 10, 1)[1]
    importer = start_peer()
    importer.ask("take", received)
    assert importer.ask("read") == {"bytes": [0x17, 0x17]}
    importer.kill()
    assert live_granules(device) == 0
    sender.close()
    receiver.close()


def test_memory_of_a_killed_process_can_be_used_again(start_peer: StartPeer) -> None:
    """All processes of a device share its memory, and see what a killed one gives back."""
    one, other = start_peer(), start_peer()
    before = other.ask("free_bytes")["bytes"]
    os.close(one.ask("make", byte=1)["descriptor"])
    assert other.ask("free_bytes")["bytes"] == before - GRANULE_BYTES
    one.kill()
    assert other.ask("free_bytes")["bytes"] == before


def test_ipc_memory_is_opened_elsewhere_and_poisoned_when_it_is_freed(start_peer: StartPeer, device: Path) -> None:
    """An IPC handle is no use to its exporter, one address to an importer, and poison once the memory is freed."""
    exporter, importer = start_peer(), start_peer()
    made = exporter.ask("allocate", byte=0x42)
    assert made["own"] == "CUDA_ERROR_INVALID_CONTEXT"
    assert importer.ask("open", handle=made["handle"]) == {"same": True}
    assert importer.ask("read") == {"bytes": [0x42, 0x42]}
    exporter.ask("free")
    assert importer.ask("read") == {"bytes": [FREED_BYTE, FREED_BYTE]}
    assert live_granules(device) == 1
    importer.kill()
    assert live_granules(device) == 0
    assert start_peer().ask("open", handle=made["handle"]) == {"error": "CUDA_ERROR_MAP_FAILED"}


@pytest.fixture
def page() -> Iterator[tuple[int, mmap.mmap]]:
    """A page to share: its descriptor and its mapping here."""
    descriptor = os.memfd_create("progress page")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    with mmap.mmap(descriptor, mmap.PAGESIZE) as mapping:
        yield descriptor, mapping
    os.close(descriptor)


def test_stream_of_one_process_waits_for_a_value_of_another(start_peer: StartPeer, page: tuple[int, mmap.mmap]) -> None:
    """A value that one process's stream writes to a shared registered page ends the wait of another's stream."""
    writer, waiter = start_peer(), start_peer()
    for peer in (writer, waiter):
        peer.ask("share_page", os.dup(page[0]))
    waiter.ask("wait_value", value=7)
    assert waiter.ask("query") == {"state": "CUDA_ERROR_NOT_READY"}
    writer.ask("write_value", value=7)
    writer.ask("finish")
    assert waiter.ask("finish") == {}


def test_wait_for_a_killed_process_ends_by_a_store_of_the_host(
    start_peer: StartPeer, page: tuple[int, mmap.mmap]
) -> None:
    """A stream that waits for a process which was killed waits on, until somebody stores the value in its place."""
    writer, waiter = start_peer(), start_peer()
    for peer in (writer, waiter):
        peer.ask("share_page", os.dup(page[0]))
    waiter.ask("wait_value", value=1 << 33)
    writer.kill()
    assert waiter.ask("query") == {"state": "CUDA_ERROR_NOT_READY"}
    page[1][:8] = (1 << 33).to_bytes(8, sys.byteorder)
    assert waiter.ask("finish") == {}


def test_event_is_waited_for_in_another_process(start_peer: StartPeer, page: tuple[int, mmap.mmap]) -> None:
    """A stream waits for an IPC event of another process until the work before its record is done."""
    recorder, waiter = start_peer(), start_peer()
    recorder.ask("share_page", os.dup(page[0]))
    recorder.ask("wait_value", value=1)
    event = recorder.ask("record_event")["handle"]
    assert waiter.ask("wait_event", handle=event) == {"state": "CUDA_ERROR_NOT_READY"}
    assert waiter.ask("query") == {"state": "CUDA_ERROR_NOT_READY"}
    page[1][:1] = b"\1"
    assert waiter.ask("finish") == {}


def test_forked_process_cannot_use_the_driver(start_peer: StartPeer) -> None:
    """A child that was forked after cuInit is refused."""
    assert start_peer().ask("fork") == {"refused": True}


def test_memory_of_a_device_that_a_process_does_not_see_is_refused(start_peer: StartPeer) -> None:
    """A descriptor of device 0 cannot be imported where CUDA_VISIBLE_DEVICES shows device 1 only."""
    exporter = start_peer(FAKE_CUDA_DEVICES="2")
    blind = start_peer(FAKE_CUDA_DEVICES="2", CUDA_VISIBLE_DEVICES="1")
    descriptor = exporter.ask("make", byte=1)["descriptor"]
    assert blind.ask("take", descriptor) == {"error": "CUDA_ERROR_NOT_SUPPORTED"}


def test_cuda_bindings_run_on_it_as_they_are(environment: dict[str, str], device: Path, tmp_path: Path) -> None:
    """NVIDIA's cuda-bindings, not changed, create, share, survive, import and copy on the fake driver."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    command = [sys.executable, "-m", "tests.cuda_driver.with_bindings"]
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "copied\n", "")
    assert live_granules(device) == 0
    assert calls(read(tmp_path / "trace"), "cuMemcpyBatchAsync")
