"""The blocking client against a scripted daemon: deadlines, death, errors, misses, forks."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcached_client import (
    Admin,
    BadRequest,
    Client,
    DaemonUnreachable,
    DeadlineExceeded,
    ErrorCode,
    KvGroup,
    Layout,
    NoCapacity,
    Refused,
    RequestError,
    SessionGrant,
    Stale,
    TransportError,
)
from kvcached_client.errors import request_error
from kvcached_client.protocol.engine import (
    Acquire,
    Bye,
    CheckReport,
    Description,
    Header,
    HealthReport,
    Hello,
    InspectReport,
    Match,
    Matched,
    Request,
    StatsReport,
    Tree,
    TreeNode,
    TreeReport,
    error_reply,
    pack_tree_nodes,
)
from kvcached_client.transport.attach import AttachConnection
from tests.client.fake_daemon import SILENCE, FakeDaemon, Script

Connect = Callable[..., Client]


def failing(code: ErrorCode, kind: type[Header]) -> Script:
    """Answers requests of one verb with an error."""

    def script(request: Request, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
        return (error_reply(request.id, request_error(code, "no", "stop")), []) if isinstance(request, kind) else None

    return script


def silent_on(*kinds: type[Header]) -> Script:
    """Leaves requests of some verbs without a reply."""
    return lambda request, _: (SILENCE, []) if isinstance(request, kinds) else None


def test_connect_takes_over_what_the_daemon_grants(daemon: FakeDaemon, connect: Connect) -> None:
    """A connected client knows its session, layout, slots, epoch and namespace."""
    client = connect(replica="blue", layout=daemon.joined.layout)
    assert client.session == SessionGrant(id=3, token=b"t" * 32, run_dir=str(daemon.run_dir))
    assert (client.layout, client.slots, client.epoch) == (daemon.joined.layout, 64, 1)
    assert client.namespace == b"n" * 32
    assert client.is_alive
    (hello,) = daemon.of(Hello)
    assert isinstance(hello, Hello)
    assert (hello.replica, hello.layout) == ("blue", daemon.joined.layout.fingerprint())


def test_connect_refuses_another_layout(connect: Connect) -> None:
    """A daemon that serves another layout than the engine was built for is not used."""
    group = KvGroup(layers=1, kv_heads=1, head_dim=8, v_head_dim=8, dtype="float16")
    with pytest.raises(Refused) as caught:
        connect(layout=Layout(block_size=4, shards=1, groups=(group,)))
    assert caught.value.code == ErrorCode.WRONG_LAYOUT


@pytest.mark.parametrize("failures", ["raise", "miss"])
def test_connect_raises_what_the_daemon_says(daemon: FakeDaemon, connect: Connect, failures: str) -> None:
    """An engine whose pool is taken learns it, with either setting of failures."""
    daemon.script = failing(ErrorCode.POOL_BUSY, Hello)
    with pytest.raises(Refused) as caught:
        connect(failures=failures)
    assert (caught.value.code, caught.value.message, caught.value.fix) == (ErrorCode.POOL_BUSY, "no", "stop")


@pytest.mark.parametrize(("setting", "value"), [("failures", "foo"), ("deadline_ms", 0), ("deadline_ms", 1 << 31)])
def test_connect_refuses_settings_that_mean_nothing(run_dir: Path, setting: str, value: Any) -> None:
    """A misspelt way to fail, or no time at all, is refused before anything is asked, and never taken for a default."""
    with pytest.raises(ValueError, match=f"^{setting} is {value!r}, "):
        Client.connect(run_dir, **{setting: value})


def test_connect_without_daemon_is_unreachable(run_dir: Path) -> None:
    """Where nothing listens, the error says so, and which path was tried."""
    with pytest.raises(DaemonUnreachable, match=f"no socket {run_dir}"):
        Client.connect(run_dir)


def test_session_grant_survives_a_pipe_and_hides_its_token() -> None:
    """A grant travels as bytes; its token shows in no log."""
    grant = SessionGrant(id=3, token=b"secret" + b"t" * 26, run_dir="/run/kvcached")
    assert SessionGrant.from_bytes(grant.to_bytes()) == grant
    assert "secret" not in repr(grant)
    with pytest.raises(BadRequest):
        SessionGrant.from_bytes(b"\x80")


def test_match_counts_the_leading_blocks(daemon: FakeDaemon, connect: Connect) -> None:
    """Match sends every full block's key and the prompt's length, and nothing at all where no block is full."""
    client = connect()
    assert client.match(client.chain([1, 2, 3])) == 0
    assert daemon.of(Match) == []
    chain = client.chain(range(10))
    assert client.match(chain, full=True) == 2
    request, frames = daemon.requests[-1]
    assert isinstance(request, Match)
    assert (request.tokens, request.full, request.epoch) == (10, True, 1)
    assert frames == [chain.keys]


def test_call_ends_at_its_deadline(daemon: FakeDaemon, connect: Connect) -> None:
    """A daemon that does not answer costs the deadline, not more."""
    client = connect(deadline_ms=250)
    daemon.script = silent_on(Match)
    with pytest.raises(DeadlineExceeded):
        client.match(client.chain(range(8)))


def test_late_reply_answers_no_other_request(daemon: FakeDaemon, connect: Connect) -> None:
    """A reply that comes after its deadline is dropped; the next call gets its own."""
    client = connect(deadline_ms=250)
    late: list[Request] = []

    def script(request: Request, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
        if not isinstance(request, Match):
            return None
        late.append(request)
        # The second request is answered with the first one's id, that is, too late, and never with its own.
        return (Matched(id=late[0].id, device=9), []) if len(late) == 2 else (SILENCE, [])

    daemon.script = script
    chain = client.chain(range(8))
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            client.match(chain)
    daemon.script = None
    assert client.match(chain) == 2


def test_waiting_call_ends_when_the_daemon_dies(daemon: FakeDaemon, connect: Connect) -> None:
    """A client in the middle of a call is free again within a second of the daemon's death, whatever its deadline."""
    client = connect(deadline_ms=30_000)
    waiting = threading.Event()

    def script(request: Request, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
        if not isinstance(request, Match):
            return None
        waiting.set()
        return SILENCE, []

    daemon.script = script
    died_at: list[float] = []

    def kill() -> None:
        waiting.wait()
        died_at.append(time.monotonic())
        daemon.stop()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(DaemonUnreachable):
        client.match(client.chain(range(8)))
    freed_at = time.monotonic()
    killer.join()
    assert freed_at - died_at[0] < 1.0
    assert not client.is_alive


def test_reply_behind_the_end_of_the_attach_connection_is_not_lost(
    daemon: FakeDaemon, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that stops answers the last request; its answer counts though the attach connection ended before it."""
    client = connect()
    end_seen = threading.Event()
    is_closed = AttachConnection.is_closed_by_daemon

    def noted(connection: AttachConnection) -> bool:
        end_seen.set()
        return is_closed(connection)

    def script(request: Request, _: list[bytes]) -> None:
        if isinstance(request, Match):
            daemon.detach()
            assert end_seen.wait(20)  # the client has looked, and the reply is not there yet

    monkeypatch.setattr(AttachConnection, "is_closed_by_daemon", noted)
    daemon.script = script
    assert client.match(client.chain(range(8))) == 2
    daemon.stop()
    with pytest.raises(DaemonUnreachable):
        client.match(client.chain(range(8)))


def test_calls_after_the_daemons_death_fail_at_once(daemon: FakeDaemon, connect: Connect) -> None:
    """Each call to a dead daemon raises, and closing the client does not wait for it either."""
    client = connect(deadline_ms=30_000)
    daemon.stop()
    started_at = time.monotonic()
    for _ in range(3):
        with pytest.raises(DaemonUnreachable):
            client.match(client.chain(range(8)))
    client.close()
    assert time.monotonic() - started_at < 1.0


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        (ErrorCode.MALFORMED, BadRequest),
        (ErrorCode.FOREIGN_LEASE, Refused),
        (ErrorCode.STALE_EPOCH, Stale),
        (ErrorCode.NO_CAPACITY, NoCapacity),
        (ErrorCode.WORKER_LOST, RequestError),
    ],
)
def test_error_replies_raise_their_class(
    daemon: FakeDaemon, connect: Connect, code: ErrorCode, raised: type[RequestError]
) -> None:
    """The code of an error reply decides what is raised, and message and fix come along."""
    client = connect()
    daemon.script = failing(code, Acquire)
    with pytest.raises(raised) as caught:
        client.acquire("a", client.chain(range(8)))
    assert (caught.value.code, caught.value.message, caught.value.fix) == (code, "no", "stop")


def test_stale_answer_ends_the_client(daemon: FakeDaemon, connect: Connect) -> None:
    """Once the daemon says that the epoch is over, the client says that it is not alive."""
    client = connect()
    daemon.script = failing(ErrorCode.STALE_EPOCH, Match)
    with pytest.raises(Stale):
        client.match(client.chain(range(8)))
    assert not client.is_alive


def test_reply_of_another_verb_is_refused(daemon: FakeDaemon, connect: Connect) -> None:
    """A reply that answers another kind of question is an error, not a result."""
    client = connect()
    daemon.script = lambda request, _: (
        (CheckReport(id=request.id, ok=True, violations=()), []) if isinstance(request, Match) else None
    )
    with pytest.raises(BadRequest, match="CheckReport instead of Matched"):
        client.match(client.chain(range(8)))


def test_oversize_request_never_leaves(daemon: FakeDaemon, connect: Connect) -> None:
    """A prompt of more tokens than a message may name is refused here, and the session goes on."""
    client = connect()
    chain = client.chain(np.zeros((1 << 20) + 4, np.int32))
    for call in (lambda: client.match(chain), lambda: client.acquire("a", chain)):
        with pytest.raises(BadRequest):
            call()
    with pytest.raises(BadRequest):
        client.acquire("n" * 257, client.chain(range(8)))
    assert daemon.of(Match) == daemon.of(Acquire) == []
    assert client.match(client.chain(range(8))) == 2


@pytest.mark.parametrize("kind", ["error", "silence", "death"])
def test_failures_become_misses(
    daemon: FakeDaemon, connect: Connect, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """With failures as misses, no failure of the daemon reaches the engine; each is counted, each kind logged once."""
    client = connect(failures="miss", deadline_ms=250)
    held = client.acquire("held", client.chain(range(8)))
    if kind == "death":
        daemon.stop()
    else:
        verbs = (Match, Acquire)
        daemon.script = silent_on(*verbs) if kind == "silence" else failing(ErrorCode.WORKER_LOST, Header)
    chain = client.chain(range(8))
    with caplog.at_level(logging.WARNING, "kvcached_client"):
        for attempt in (1, 2):
            assert client.match(chain) == 0
            with client.acquire(f"r{attempt}", chain, reserve_tokens=8) as lease:
                assert not lease.granted
                assert (lease.id, lease.hit_blocks, lease.hit_tokens, lease.capacity_tokens) == (0, 0, 0, 0)
                assert lease.block_table.tolist() == []
                lease.allocate(100)
                lease.commit(8)
                lease.finish(8)
    assert client.failure_count == 4
    assert len(caplog.records) == 1
    if kind != "silence":
        held.allocate(80)
        held.commit(8)
        held.finish(8)
        assert client.failure_count > 4


def test_failures_raise_by_default(daemon: FakeDaemon, connect: Connect) -> None:
    """Nothing is swallowed unless it was asked for."""
    client = connect()
    daemon.stop()
    with pytest.raises(TransportError):
        client.acquire("a", client.chain(range(8)))
    assert client.failure_count == 0


def test_programming_errors_are_no_misses(connect: Connect) -> None:
    """An empty prompt, a negative reserve and an unknown policy raise even where failures are misses."""
    client = connect(failures="miss")
    chain = client.chain(range(8))
    with pytest.raises(BadRequest):
        client.acquire("a", client.chain())
    with pytest.raises(BadRequest):
        client.acquire("a", chain, reserve_tokens=-1)
    with pytest.raises(BadRequest):
        client.acquire("a", chain, cache="everything")  # type: ignore[arg-type]
    assert client.failure_count == 0


def test_close_says_goodbye_once(daemon: FakeDaemon, connect: Connect) -> None:
    """Closing ends the session on the daemon's side; closing again does nothing."""
    client = connect()
    client.close()
    client.close()
    assert len(daemon.of(Bye)) == 1
    assert not client.is_alive


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "call", [lambda client, chain: client.match(chain), lambda client, _: client.rejoin()], ids=["match", "rejoin"]
)
def test_forked_child_cannot_use_the_client(
    daemon: FakeDaemon, connect: Connect, call: Callable[[Client, Any], object]
) -> None:
    """In a child every use raises, closing sends nothing, and the parent's client goes on working."""
    client = connect(heartbeat=True, failures="miss")
    chain = client.chain(range(8))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call(client, chain)
        except RuntimeError as error:
            client.close()
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    said = os.read(reader, 4096).decode()
    os.close(reader)
    assert f"belongs to process {os.getpid()}" in said
    assert client.match(chain) == 2
    assert daemon.of(Bye) == []


def test_admin_asks_without_a_session(daemon: FakeDaemon) -> None:
    """Reports need no attach and no hello."""
    replies: list[Header] = [
        StatsReport(
            id=1,
            state="serving",
            offload_paused=False,
            daemon_epoch=1,
            uptime_ms=2,
            sessions=0,
            runs=0,
            cached_blocks=0,
            pools=(),
            hosts=(),
            transfers={},
            counters={"a": 1},
        ),
        HealthReport(id=2, ok=True, parts=()),
        CheckReport(id=3, ok=False, violations=("broken",)),
        Description(
            id=4,
            version="0",
            protocol_min=1,
            protocol_max=1,
            daemon_epoch=1,
            state="serving",
            pid=9,
            replicas=(),
            offload=None,
            limits={},
        ),
        InspectReport(id=5, found=False),
    ]
    daemon.script = lambda request, _: (replies[request.id - 1], [])
    with Admin.connect(daemon.run_dir) as admin:
        assert [admin.stats(), admin.health(), admin.check(), admin.describe(), admin.inspect(b"k" * 16)] == replies
    assert len(daemon.requests) == 5


NODE = TreeNode(
    level=1, key=b"k" * 16, start=0, blocks=2, tiers={"default": 2, "host": 1}, loading=0, pins=1, children=0, hidden=0
)


def test_tree_comes_with_its_nodes(daemon: FakeDaemon) -> None:
    """The question names what was asked for, and the frame becomes nodes."""
    daemon.script = lambda request, _: (TreeReport(id=1, runs=1, blocks=2, shown=1), [pack_tree_nodes([NODE])])
    with Admin.connect(daemon.run_dir) as admin:
        report, nodes = admin.tree("default", levels=2, children=3)
    assert daemon.of(Tree) == [Tree(id=1, replica="default", levels=2, children=3)]
    assert (report.blocks, nodes) == (2, [NODE])


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x91\x01", b"\xdd\xff\xff\xff\xff"])
def test_unreadable_tree_is_a_typed_error(daemon: FakeDaemon, frame: bytes) -> None:
    """A frame that is no array of nodes raises what other broken replies raise."""
    daemon.script = lambda request, _: (TreeReport(id=1, runs=1, blocks=2, shown=1), [frame])
    with Admin.connect(daemon.run_dir) as admin, pytest.raises(BadRequest, match="unreadable tree"):
        admin.tree()


def test_questions_out_of_their_limits_never_leave(daemon: FakeDaemon) -> None:
    """A key of another size, and a tree that is too deep or too wide, are refused here."""
    with Admin.connect(daemon.run_dir) as admin:
        for ask in (lambda: admin.inspect(b"k"), lambda: admin.tree(levels=65), lambda: admin.tree(children=257)):
            with pytest.raises(BadRequest):
                ask()
    assert daemon.requests == []


def test_without_a_socket_nothing_waits(daemon: FakeDaemon, run_dir: Path) -> None:
    """Where there is no socket, or nobody behind it, a connect says so and does not wait for its deadline."""
    rpc = run_dir / "rpc.sock"
    rpc.unlink()
    for connect in (Admin.connect, Client.connect):
        with pytest.raises(DaemonUnreachable, match=f"no socket {rpc}; start the daemon"):
            connect(run_dir, deadline_ms=3_600_000)
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(rpc))
    for connect in (Admin.connect, Client.connect):
        with pytest.raises(DaemonUnreachable, match=f"{rpc}: Connection refused; start the daemon"):
            connect(run_dir, deadline_ms=3_600_000)
