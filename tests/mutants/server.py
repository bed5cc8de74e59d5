"""Mistakes of the daemon's sockets, and of its start."""

from __future__ import annotations

import pytest

from kvcached import daemon
from kvcached.server.attach import AttachServer
from kvcached.server.connections import Connections
from kvcached.server.held import HeldBytes
from kvcached.server.pauses import Pauses
from kvcached.server.rpc import RpcServer
from kvcached.server.turns import Turns
from kvcached_client.protocol.curve import CurveReader, CurveServer
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
    rewrite(
        patch, RpcServer._refuse, "self._reply(connection, connection.encode([encode(refusal(parts, error))]))", "pass"
    )


@caught_by("tests/rpc/test_server.py::test_after_a_fault_few_connect_for_a_moment")
def flood_of_connections_taken_as_it_comes(patch: pytest.MonkeyPatch) -> None:
    """A peer that is cut off and connects anew, on and on, keeps the daemon busy."""
    patch.setattr(Connections, "take_fault", lambda _: False)


@caught_by("tests/rpc/test_server.py::test_connections_of_one_process_take_turns")
def first_connection_of_a_process_always_first(patch: pytest.MonkeyPatch) -> None:
    """A connection that always has something to be read keeps out the others of its process."""
    rotated = "[*ready[(start := self._rotation % len(ready)) :], *ready[:start]]"
    rewrite(patch, RpcServer._on_ready, rotated, "sorted(ready)")


@caught_by("tests/access/test_shares.py::test_request_without_its_role_is_refused_and_the_next_one_served")
def role_of_a_request_not_checked(patch: pytest.MonkeyPatch) -> None:
    """Whoever may connect may send every request."""
    rewrite(patch, RpcServer._serve, "connection.grants.check(request)", "pass")


@caught_by("tests/attach/test_attach_server.py::test_server_gives_nothing_to_who_is_no_engine")
def role_of_a_process_that_attaches_not_checked(patch: pytest.MonkeyPatch) -> None:
    """Whoever may look may attach as an engine."""
    rewrite(
        patch, AttachServer._serve, "connection.grants.check_engine(str(type(request).__struct_config__.tag))", "pass"
    )


@caught_by("tests/access/test_shares.py::test_other_users_leave_places_to_operators")
def no_places_for_operators(patch: pytest.MonkeyPatch) -> None:
    """Other users' connections fill a socket, and no operator gets in."""
    rewrite(patch, Connections._check, "0 if Role.OPERATE in grants.roles else limits.reserved", "0")


@caught_by("tests/access/test_shares.py::test_user_with_many_processes_fills_its_own_share")
def share_of_a_user_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A user gets further places by further processes."""
    rewrite(patch, Connections._check, "not grants.is_own and self._of_user[user] >= limits.per_user", "False")


@caught_by("tests/access/test_shares.py::test_turns_of_another_user_are_few_at_a_time")
def turns_of_another_user_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A user with many connections keeps the daemon busy before others get their turn."""
    rewrite(patch, RpcServer._on_ready, "turns.get(connection.owner, 0) + 1", "0")


@caught_by("tests/access/test_shares.py::test_unfinished_messages_of_another_user_are_its_own_loss")
def memory_of_another_user_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A user's unfinished messages take the memory that all share."""
    rewrite(patch, HeldBytes.is_beyond, " or self._of_user[connection.origin.user] > USER_HELD_BYTES_MAX", "")


@caught_by("tests/rpc/test_tcp.py::test_unknown_key_is_refused_in_the_handshake_and_counted")
def every_key_is_let_in(patch: pytest.MonkeyPatch) -> None:
    """A client whose key is not in the list gets a connection."""
    rewrite(patch, CurveServer._on_initiate, "not self._is_known(client)", "not client")


@caught_by("tests/rpc/test_curve.py::test_message_that_comes_again_is_a_violation")
def box_that_comes_again_is_opened(patch: pytest.MonkeyPatch) -> None:
    """A recorded request takes effect a second time."""
    rewrite(patch, CurveReader._heard_nonce, "number <= self._heard", "number < 0")


@caught_by("tests/rpc/test_curve.py::test_recorded_connection_opens_nothing")
def nonce_and_cookie_alone_end_the_handshake(patch: pytest.MonkeyPatch) -> None:
    """Another connection's cookie is taken, and its box opened with that connection's key."""
    rewrite(patch, CurveServer._on_initiate, "body[len(_INITIATE) : nonce_at] != cookie", "False")
    rewrite(patch, CurveServer._begin, "short, cookie = new_pair(), ", "short, cookie = self._keys, ")


@caught_by("tests/rpc/test_server.py::test_turn_ends_when_somebody_else_waits")
def batch_served_to_its_end(patch: pytest.MonkeyPatch) -> None:
    """A client's requests wait until another one's batch is through."""
    rewrite(patch, RpcServer._is_awaited, "bool(self._queues) or any", "any(()) and any")


@caught_by("tests/rpc/test_pauses.py::test_refusals_of_a_process_count_over_its_connections")
def refusals_forgotten_with_their_connection(patch: pytest.MonkeyPatch) -> None:
    """A process sends requests that are refused on and on, each time on a new connection."""
    rewrite(patch, Pauses.refuse, "self._refused.pop(owner, 0) + size", "(self._refused.clear() or 0) + size")


@caught_by("tests/rpc/test_pauses.py::test_process_of_many_refused_requests_is_paused")
def refused_requests_cost_nothing(patch: pytest.MonkeyPatch) -> None:
    """A process that sends small requests to be refused, on and on, takes the daemon's time."""
    rewrite(patch, RpcServer._refuse, "max(REFUSED_REQUEST_BYTES, sum(map(len, parts)))", "sum(map(len, parts))")


@caught_by("tests/attach/test_turns.py::test_connections_of_a_user_take_turns_with_everybody_else")
def attach_connections_without_turns(patch: pytest.MonkeyPatch) -> None:
    """All connections of a user that have something are served before anybody else."""
    rewrite(patch, Turns._on_ready, "and owner not in served", "")
