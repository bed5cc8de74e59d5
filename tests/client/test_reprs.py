"""How objects of the SDK look in a debugger and in a log: short, and without what could be used to ask for blocks."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvcached_client import (
    Admin,
    AsyncClient,
    BlockJob,
    Client,
    EnginePages,
    KeyChain,
    Offered,
    Piece,
    PreparedLoad,
    PreparedStore,
)
from kvcached_client.errors import DaemonSilent, ErrorCode, LoadFailed, request_error
from kvcached_client.types import LeaseId, TransferId
from tests.client.fake_daemon import FakeDaemon
from tests.client.test_offload import Script, connect

Connect = Callable[..., Client]
KEY = b"\xabsecret of a key"
SLOTS = np.arange(3, dtype=np.int32)


def test_client_and_lease_say_what_they_hold(daemon: FakeDaemon, connect: Connect) -> None:
    """A client names its session and pool, and whether it lives; a lease its request, its hit and its blocks."""
    client = connect()
    where = f"session=3, run_dir={str(daemon.run_dir)!r}, slots=64"
    assert repr(client) == f"Client({where}, alive)"
    lease = client.acquire("r-1", client.chain(range(10), salt="tenant"))
    assert repr(lease) == "Lease(request='r-1', hit_blocks=0, ready_blocks=0, blocks=3)"
    with client.batch() as batch:
        call = batch.commit(lease, 4)
        assert (repr(batch), repr(call)) == ("CallBatch(1 calls under way, open)", "BatchedCall(under way)")
    assert (repr(batch), repr(call)) == ("CallBatch(0 calls under way, ended)", "BatchedCall(over)")
    lease.release()
    assert repr(lease) == "Lease(request='r-1', released)"
    client.close()
    assert repr(client) == f"Client({where}, over)"


def test_lease_that_was_not_granted_says_why(daemon: FakeDaemon, connect: Connect) -> None:
    """With failures as misses, the reason is in the lease's words."""
    client = connect(failures="miss")
    daemon.stop()
    assert repr(client.acquire("r", client.chain(range(10)))) == "Lease(request='r', not granted: unreachable)"


def test_asyncio_client_looks_like_the_other(daemon: FakeDaemon) -> None:
    """The classes for an event loop have their own names in it."""

    async def shown() -> tuple[str, str]:
        async with await AsyncClient.connect(daemon.run_dir, heartbeat=False) as client:
            lease = await client.acquire("r", client.chain(range(5)))
            return repr(client), repr(lease)

    client, lease = asyncio.run(shown())
    assert client.startswith("AsyncClient(session=3, ")
    assert lease == "AsyncLease(request='r', hit_blocks=0, ready_blocks=0, blocks=2)"


def test_offload_client_says_its_session(daemon: FakeDaemon) -> None:
    """A client in offload mode names the generation, too."""
    daemon.script = Script()
    with connect(daemon) as client:
        assert repr(client) == f"OffloadClient(session=3, run_dir={str(daemon.run_dir)!r}, generation=3, alive)"


def test_admin_says_where_it_is_connected(daemon: FakeDaemon) -> None:
    """A connection without a session shows its socket."""
    admin = Admin.connect(daemon.run_dir)
    assert repr(admin) == f"Admin({str(daemon.run_dir / 'rpc.sock')!r})"
    admin.close()
    assert repr(admin).endswith(", closed)")


def test_nothing_shows_keys() -> None:
    """Chains, offers, plans and jobs tell their sizes, whatever they hold."""
    chain = KeyChain(bytes(32), 4, range(14), salt="secret")
    load = PreparedLoad(TransferId(7), 3, SLOTS, 1)
    store = PreparedStore(TransferId(8), 3, 3, (Piece(0, 3),), SLOTS)
    keys = KEY * 8
    shown = {
        repr(chain): "KeyChain(tokens=14, blocks=3, block_size=4)",
        repr(Offered(LeaseId(2), 1, KEY * 3)): "Offered(lease=2, start=1, blocks=3)",
        repr(load): "PreparedLoad(transfer=7, generation=3, start=1, blocks=3)",
        repr(store): "PreparedStore(transfer=8, generation=3, depth=3, pieces=1, blocks=3)",
        repr(load.job(keys, range(8))): "BlockJob(transfer=7, generation=3, start=1, spans=1, blocks=3)",
        repr(BlockJob(TransferId(1), 3, ())): "BlockJob(transfer=1, generation=3, start=0, spans=0, blocks=0)",
    }
    assert list(shown) == list(shown.values())


def test_pages_say_their_size() -> None:
    """An engine's pages are shown without addresses."""
    assert repr(EnginePages((), 4, bytes(16), ())) == ("EnginePages(blocks=4, block_bytes=0, layers=0, on the CPU)")


@pytest.mark.parametrize("code", list(ErrorCode))
def test_error_reaches_another_process(code: ErrorCode) -> None:
    """Errors come through pickle as they were, with their code and fix, as from a shard process to its scheduler."""
    error = request_error(code, "what is wrong", "what to do")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert (type(copy), str(copy), copy.code, copy.fix) == (type(error), str(error), code, "what to do")
    assert repr(copy) == f"{type(error).__name__}('{code}: what is wrong (what to do)')"


def test_every_error_has_a_code_and_a_fix() -> None:
    """Whatever the package raises may be asked for `code` and `fix`; an error without a reply has no code."""
    silent = DaemonSilent("it is stopped", fix="kill -CONT 7")
    copy = pickle.loads(pickle.dumps(silent))  # noqa: S301 - our own
    shown = [(str(each), each.code, each.message, each.fix) for each in (silent, copy, LoadFailed("load 3 failed"))]
    told = ("it is stopped; kill -CONT 7", None, "it is stopped", "kill -CONT 7")
    assert shown == [told, told, ("load 3 failed", None, "load 3 failed", "")]


def test_run_dir_is_shown_as_it_was_given(daemon: FakeDaemon, connect: Connect) -> None:
    """A grant shows where its daemon is, and no token."""
    grant = connect().session
    assert repr(grant) == f"SessionGrant(id=3, run_dir={str(Path(daemon.run_dir))!r})"
