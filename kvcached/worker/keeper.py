"""For whom a worker holds its memory: the daemon that started it, and after its death, for a while, the next one."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvcached.seqpacket import Packet, peer_credentials, receive, send
from kvcached.worker.messages import (
    MESSAGE_SIZE_BYTES_MAX,
    WorkerConfig,
    WorkerRefusal,
    decode_adopt,
    differences,
    encode,
)
from kvcached.worker.serving import BadCommand, DaemonGone, Serving
from kvcached.worker.shard import Shard, memory_identity

#: A daemon that connects says at once what it expects, and the one before it is dead by then, or it is not the next.
#: (A dying process closes its files, and so gives up the run directory, a moment before its death can be seen.)
INTRODUCTION_S: Final = 1.0
#: Its pidfd and the host pool's memory.
_DESCRIPTORS_MAX: Final = 2
_PID_LINE: Final = re.compile(r"^Pid:\t(-?\d+)$", re.MULTILINE)

_log: Final = logging.getLogger(__name__)


class _Refused(Exception):
    """This worker is of no use to whoever connected, or is not free."""


class _Event(NamedTuple):
    """What to do when a descriptor is readable. Of several that are, the one with the lowest rank goes first."""

    rank: int
    act: Callable[[], None]


@dataclass(slots=True)
class _Candidate:
    """Somebody who would have this worker."""

    connection: socket.socket
    until_s: float
    config: WorkerConfig | None = None  #: what it expects; None until it has said so
    pidfd: int = -1

    def close(self) -> None:
        """Close the connection and the pidfd. Does nothing the second time."""
        self.connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Keeper:
    """Serves one daemon after the other, in one thread that waits for one of them, or for the end of the grace period.

    Args:
        shard: what is held.
        config: what the worker was told at its start.
        listener: where daemons connect, non-blocking. The first one needs no introduction: it made this process.
    """

    def __init__(self, shard: Shard, config: WorkerConfig, listener: socket.socket) -> None:
        self._shard = shard
        self._config = config
        self._listener = listener
        self._daemon = config.daemon_pidfd  #: -1 once it is dead
        self._was_served = False
        self._serving: Serving | None = None  #: until nothing of it is under way any more
        self._is_orphan = False  #: what `_serving` still does was ordered by a daemon that is gone
        self._until_s = 0.0  #: the end of the grace period, where it is an orphan
        self._candidate: _Candidate | None = None
        self._over = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve until a daemon orders the end, or none is left and the grace period is over."""
        self._watch(self._daemon, 1, self._on_daemon_dead)
        self._watch(self._listener.fileno(), 4, self._on_connecting)
        with self._selector:
            while not self._over:
                ready = [key.data for key, _ in self._selector.select(self._patience_s())]
                # One at a time: what it does may make the others void.
                act = min(ready, key=_rank).act if ready else self._on_late
                try:
                    act()
                    self._serve_candidate()
                except BadCommand as reason:
                    self._end(str(reason))

    def _watch(self, descriptor: int, rank: int, act: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, _Event(rank, act))

    def _patience_s(self) -> float | None:
        """How long to wait for the next event; None for as long as it takes."""
        due_s = []
        if self._candidate is not None and not self._is_acceptable(self._candidate):
            due_s.append(self._candidate.until_s)
        elif self._is_orphan and self._candidate is None:
            due_s.append(self._until_s)
        return max(0.0, min(due_s) - time.monotonic()) if due_s else None

    def _on_late(self) -> None:
        if self._candidate is None:
            self._end(f"no other daemon came within {self._config.grace_ms} ms")
        elif self._candidate.config is None:
            self._refuse("it did not say what it expects")
        else:
            self._refuse("the daemon that this worker serves is alive")

    # --- The daemon that is served ---

    def _serve(self, connection: socket.socket) -> None:
        self._serving = serving = Serving(self._shard, connection)
        self._was_served, self._is_orphan = True, False
        self._watch(serving.ended, 0, self._on_quiet)
        self._watch(serving.fileno(), 2, self._on_command)
        try:
            serving.greet()
        except OSError as error:
            self._orphan(f"the connection broke: {error}")

    def _on_command(self) -> None:
        if self._serving is None:
            return
        try:
            self._serving.receive()
        except DaemonGone as reason:
            self._orphan(str(reason))

    def _on_daemon_dead(self) -> None:
        self._selector.unregister(self._daemon)
        os.close(self._daemon)
        self._daemon = -1
        if self._was_served:
            self._orphan("the daemon is dead")
        else:
            self._end("the daemon is dead")

    def _orphan(self, reason: str) -> None:
        """Nobody gives orders any more. Does nothing the second time."""
        if self._is_orphan:
            return
        self._is_orphan = True
        if self._serving is not None:
            self._selector.unregister(self._serving.fileno())
            self._serving.drop()
        if not self._config.grace_ms:
            self._end(reason)
            return
        self._until_s = time.monotonic() + self._config.grace_ms / 1000
        _log.warning("%s; the memory is kept for the next one, up to %d ms", reason, self._config.grace_ms)

    def _on_quiet(self) -> None:
        """Nothing of the daemon's orders is under way, nor will be."""
        serving = self._serving
        if serving is None:
            return
        if serving.is_last:
            self._end("the daemon ordered it")
            return
        self._orphan("acks do not reach the daemon")
        self._selector.unregister(serving.ended)
        serving.close()
        self._serving = None

    # --- The one that would be next ---

    def _on_connecting(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # it went away before
            _log.warning("no connection was accepted: %s", error)
            return
        credentials = peer_credentials(connection)
        if credentials.uid != os.geteuid():
            _log.warning("refused a connection of uid %d", credentials.uid)
            connection.close()
        elif not self._was_served:
            self._serve(connection)
        else:
            self._candidate = _Candidate(connection, time.monotonic() + INTRODUCTION_S)
            self._watch(connection.fileno(), 3, self._on_candidate)
            self._selector.unregister(self._listener)  # others wait until this one is through

    def _on_candidate(self) -> None:
        candidate = self._candidate
        if candidate is None:
            return
        try:
            packet = receive(candidate.connection, MESSAGE_SIZE_BYTES_MAX, _DESCRIPTORS_MAX)
        except OSError:
            packet = None
        if packet is None:
            self._forget_candidate()
            return
        try:
            candidate.config = self._introduced(candidate, packet)
        except _Refused as reason:
            self._refuse(str(reason))
        finally:
            packet.close()

    def _introduced(self, candidate: _Candidate, packet: Packet) -> WorkerConfig:
        """What the candidate expects, which is what there is.

        Raises:
            _Refused: it is not, or cannot be decoded.
        """
        if candidate.config is not None:
            raise _Refused("it spoke before it was answered")
        try:
            config = decode_adopt(packet.data).config
        except msgspec.DecodeError as error:
            raise _Refused(f"it sent what cannot be decoded: {error}") from None
        pid = peer_credentials(candidate.connection).pid
        if packet.cut or not packet.descriptors or not _is_pidfd(packet.descriptors[0], pid):
            raise _Refused(f"the first descriptor is no pidfd of process {pid}")
        if differing := differences(self._config, config):
            raise _Refused(f"not the same: {', '.join(differing)}")
        if memory_identity(packet.descriptors[1:]) != self._shard.host_identity:
            raise _Refused("not the same: the host pool's memory")
        candidate.pidfd = os.dup(packet.descriptors[0])
        return config

    def _is_acceptable(self, candidate: _Candidate) -> bool:
        """Whether only what is under way keeps this worker from serving it."""
        return candidate.config is not None and self._daemon < 0

    def _serve_candidate(self) -> None:
        """Serve the next daemon, if it is there, and the last one is dead, and nothing of its orders is under way."""
        candidate = self._candidate
        if candidate is None or candidate.config is None or self._daemon >= 0 or self._serving is not None:
            return
        if _polled(candidate.connection.fileno(), select.POLLRDHUP):
            self._forget_candidate()  # it does not wait any more
            return
        _log.info("adopted by process %d", peer_credentials(candidate.connection).pid)
        self._config, self._daemon = candidate.config, candidate.pidfd
        self._leave_candidate()
        self._watch(self._daemon, 1, self._on_daemon_dead)
        self._shard.progress.reset()
        self._serve(candidate.connection)

    def _refuse(self, reason: str) -> None:
        if self._candidate is None:
            return
        _log.warning("a daemon is refused: %s", reason)
        with contextlib.suppress(OSError):  # it is gone already
            send(self._candidate.connection, encode(WorkerRefusal(reason=reason)))
        self._forget_candidate()

    def _forget_candidate(self) -> None:
        candidate = self._candidate
        self._leave_candidate()
        if candidate is not None:
            candidate.close()

    def _leave_candidate(self) -> None:
        """There is no candidate any more; another one may come."""
        if self._candidate is not None:
            self._selector.unregister(self._candidate.connection)
            self._candidate = None
            self._watch(self._listener.fileno(), 4, self._on_connecting)

    def _end(self, reason: str) -> None:
        _log.info("ending: %s", reason)
        self._over = True


def serve_at(shard: Shard, config: WorkerConfig, listener: socket.socket) -> None:
    """Hold the shard's memory for as long as somebody wants it; then remove the socket, if it is still this one's."""
    own = _place(config.socket_path)
    try:
        Keeper(shard, config, listener).run()
    finally:
        listener.close()
        if own is not None and _place(config.socket_path) == own:
            Path(config.socket_path).unlink(missing_ok=True)


def _place(path: str) -> tuple[int, int] | None:
    try:
        status = Path(path).lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _rank(event: _Event) -> int:
    return event.rank


def _is_pidfd(descriptor: int, pid: int) -> bool:
    """Whether it is a pidfd of that process, which lives."""
    try:
        described = _PID_LINE.search(Path(f"/proc/self/fdinfo/{descriptor}").read_text())
    except OSError:
        return False
    if described is None or int(described[1]) != pid:
        return False
    return not _polled(descriptor, select.POLLIN)


def _polled(descriptor: int, event: int) -> bool:
    """Whether an event is there now."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(0))
