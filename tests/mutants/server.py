"""Mistakes of the daemon's sockets, and of its start."""

from __future__ import annotations

import pytest

from kvcached import daemon
from kvcached.server.attach import AttachServer
from kvcached.server.connections import Connections
from kvcached.server.rpc import RpcServer
from tests.mutants.mutant import caught_by, rewrite


@caught_by("tests/attach/test_attach_watch.py::test_server_tells_of_death")
def death_of_a_process_not_watched(patch: pytest.MonkeyPatch) -> None:
    """The daemon is not told of the death of an engine's process, and its slots are never free."""
    patch.setattr(AttachServer, "watch", lambda *_: None)


@caught_by("tests/daemon/test_storage.py::test_next_daemon_waits_for_the_last_ones_storage_process")
def last_storage_process_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """A daemon hands out host slots that the storage process of the one before may still write."""

    async def end_nobody(*_: object) -> None: ...

    patch.setattr(daemon, "end_earlier", end_nobody)


@caught_by("tests/daemon/test_bad_input.py::test_malformed_message_gets_one_typed_error")
def reply_to_a_malformed_message_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A message that is no request gets no reply."""
    rewrite(patch, RpcServer._refuse, "self._send(connection, encode_message([encode(refusal(parts, error))]))", "pass")


@caught_by("tests/rpc/test_server.py::test_after_a_fault_few_connect_for_a_moment")
def flood_of_connections_taken_as_it_comes(patch: pytest.MonkeyPatch) -> None:
    """A peer that is cut off and connects anew, on and on, keeps the daemon busy."""
    patch.setattr(Connections, "take_fault", lambda _: False)


@caught_by("tests/rpc/test_server.py::test_connections_of_one_process_take_turns")
def first_connection_of_a_process_always_first(patch: pytest.MonkeyPatch) -> None:
    """A connection that always has something to be read keeps out the others of its process."""
    rewrite(patch, RpcServer._on_ready, "ready = ready[start:] + ready[:start]", "ready.sort()")
