"""Shard processes and the pipe to them, without a daemon."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from examples.llama_engine.config import EngineSettings
from examples.llama_engine.generation import GenerationRequest
from examples.llama_engine.messages import Channel, ChannelClosed, Ready, Sample, Step, StepDone, StepItem
from examples.llama_engine.shard_group import ShardDied, ShardGroup
from kvcached_client.blocks.progress import STATE_DONE, STATE_FAILED
from kvcached_client.protocol.engine import LoadTicket
from kvcached_client.transport.attach import SessionGrant
from tests.engine.fake_attach import FakeAttachServer
from tests.engine.fakes import FakeClient
from tests.engine.tiny_llama import BLOCK_SIZE, TINY, ThreadedShards, generate, layout_of, prompt


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def test_channel_carries_messages_of_any_size_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    """What is sent arrives whole and typed, small or as large as a socket buffer."""
    left, right = (Channel(end) for end in pair)
    step = Step([StepItem(tokens=b"abcd", start=3, block_table=b"efgh", sample=True, logits=False)])
    left.send(step)
    assert right.receive_order() == step
    right.send(Ready())
    right.send(StepDone([Sample(7, b"x" * 100_000)]))
    assert left.receive_answer() == Ready()
    assert left.receive_answer() == StepDone([Sample(7, b"x" * 100_000)])


def test_channel_says_that_the_other_end_is_gone(pair: tuple[socket.socket, socket.socket]) -> None:
    """End of file is an error of its own on receive, also in the middle of a message, and on send."""
    left, right = pair
    left.sendall(b"\x10\0\0\0half")
    left.close()
    channel = Channel(right)
    with pytest.raises(ChannelClosed):
        channel.receive_order()
    with pytest.raises(ChannelClosed):
        channel.send(Ready())


def test_channel_refuses_an_absurd_length(pair: tuple[socket.socket, socket.socket]) -> None:
    """A length beyond the limit is refused before anything is allocated for it."""
    pair[0].sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ValueError, match="4294967295"):
        Channel(pair[1]).receive_order()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({**msgspec.to_builtins(TINY), "model_type": "llama"}))
    return tmp_path


@pytest.fixture
def attach_server(tmp_path: Path) -> Iterator[FakeAttachServer]:
    server = FakeAttachServer(tmp_path, layout_of(TINY, shards=2), slots=64)
    yield server
    server.close()


def test_group_names_the_shard_that_could_not_start(model_dir: Path) -> None:
    """Shards that find no daemon end, and the scheduler hears which and how."""
    session = SessionGrant(id=1, token=bytes(32), run_dir=str(model_dir))
    with pytest.raises(ShardDied, match=r"shard 0 \(pid \d+\) ended with exit status 1"):
        ShardGroup(EngineSettings(model_dir=model_dir), session)


def test_processes_compute_what_threads_compute_and_a_death_is_noticed(
    model_dir: Path, attach_server: FakeAttachServer
) -> None:
    """Two processes over gloo and mapped memory give the tokens of the in-process shards; a killed one is named."""
    request = GenerationRequest(prompt=prompt(37), max_tokens=8)
    group = ShardGroup(EngineSettings(model_dir=model_dir, tp=2, seed=3), attach_server.grant)
    try:
        client = FakeClient(layout_of(TINY, shards=2), 64)
        (result,) = generate(client, group, [request])
        (expected,) = generate(FakeClient(layout_of(TINY), 64), ThreadedShards(seed=3), [request])
        assert result.tokens == expected.tokens
        (again,) = generate(client, group, [request])
        assert (again.hit_tokens, again.tokens) == (36, result.tokens)
        first, second = group.process_ids
        os.kill(second, signal.SIGKILL)
        with pytest.raises(ShardDied, match=rf"shard \d \(pid ({first}|{second})\)"):
            generate(client, group, [request])
    finally:
        group.close()


def test_load_that_one_shard_lacks_is_told_and_the_group_goes_on(
    model_dir: Path, attach_server: FakeAttachServer
) -> None:
    """A load that failed on one of two shards makes its item unread; the item beside it and the next step are right."""
    group = ShardGroup(EngineSettings(model_dir=model_dir, tp=2, seed=3), attach_server.grant)
    done, failed = LoadTicket(transfer=5, progress=0), LoadTicket(transfer=6, progress=31)
    for shard in range(2):
        attach_server.tell(shard, done, STATE_DONE)
        attach_server.tell(shard, failed, STATE_FAILED if shard else STATE_DONE)
    try:
        first, second = (step_item(slot, loads=loads) for slot, loads in ((0, (done,)), (8, (failed,))))
        both = group.run(Step([first, second]))
        again = group.run(Step([first, step_item(8)]))
    finally:
        group.close()
    assert (both.unread, again.unread) == ([1], [])
    assert [sample.token for sample in both.samples] == [sample.token for sample in again.samples]


def step_item(slot: int, loads: tuple[LoadTicket, ...] = ()) -> StepItem:
    """Six rows of a prompt after two blocks that were read; `slot` is the first of four."""
    return StepItem(
        tokens=np.asarray(prompt(6, seed=slot), dtype=np.int32).tobytes(),
        start=2 * BLOCK_SIZE,
        block_table=np.arange(slot, slot + 4, dtype=np.int32).tobytes(),
        sample=True,
        logits=False,
        loads=loads,
    )


def test_shards_end_when_the_scheduler_dies(model_dir: Path, attach_server: FakeAttachServer) -> None:
    """A scheduler that is killed leaves no shard behind."""
    script = (
        "import sys; from pathlib import Path; from kvcached_client import SessionGrant;"
        "from examples.llama_engine.config import EngineSettings;"
        "from examples.llama_engine.shard_group import ShardGroup;"
        "grant = SessionGrant.from_bytes(bytes.fromhex(sys.argv[2]));"
        "group = ShardGroup(EngineSettings(model_dir=Path(sys.argv[1])), grant);"
        "print(*group.process_ids, flush=True); sys.stdin.read()"
    )
    scheduler = subprocess.Popen(
        [sys.executable, "-c", script, str(model_dir), attach_server.grant.to_bytes().hex()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert scheduler.stdout is not None
    pidfds = [os.pidfd_open(int(pid)) for pid in scheduler.stdout.readline().split()]
    scheduler.kill()
    scheduler.communicate()
    (pidfd,) = pidfds
    assert select.select([pidfd], [], [], 20)[0]
    os.close(pidfd)
