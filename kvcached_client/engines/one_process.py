"""An engine in offload mode that is one process: its own scheduler, and its only shard.

Nothing fails because of the daemon: an engine has a session or it has none, and a later call tries to get one again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kvcached_client.blocks.pages import EnginePages
from kvcached_client.errors import (
    DaemonFailure,
    DaemonSilent,
    DeadlineExceeded,
    Fault,
    KvcachedError,
    RequestError,
    Stale,
)
from kvcached_client.offload import Hold, OffloadClient, OffloadLayout, new_instance
from kvcached_client.offload_shard import OffloadShard
from kvcached_client.protocol.fields import NAME_LENGTH_MAX
from kvcached_client.types import KEY_SIZE_BYTES

#: After a failure, before the daemon is tried again.
RETRY_S: Final = 5.0
#: How long storage is waited for at most, whatever the daemon's configuration says. SGLang ends itself if its threads
#: are busy for ten seconds when it drops its pages.
FETCH_MS: Final = 5_000
#: Why an engine has no session, if it is not the daemon's refusal.
LOST: Final = "lost"
_names: Final = itertools.count(1)


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What an engine says of itself.

    Attributes:
        engine: name and version, for logs.
        keyspace: 32 bytes, see `OffloadClient.connect`.
        label: of its namespace, for people; its end counts if it is long.
        block_size: tokens in a block.
    """

    engine: str
    keyspace: bytes
    label: str
    block_size: int


@dataclass(slots=True, eq=False)
class OneProcessSession:
    """A session with the daemon.

    Attributes:
        client: for one thread at a time, see `turn`.
        shard: copies.
        storage_at_s: when the daemon is asked again for what is in storage; before, it said that there is none.
        since_s: when it began, by `time.monotonic`.
        turn: held by a thread while it asks the daemon, where there are several.
    """

    client: OffloadClient
    shard: OffloadShard
    storage_at_s: float = 0.0
    since_s: float = field(default_factory=time.monotonic)
    turn: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def lease(self, keys: bytes, tokens: int, *, full: bool, load_from: int | None = None) -> Iterator[Hold]:
        """A lease on a chain, and how many of its blocks are stored. See `OffloadClient.begin_acquire`."""
        with self.turn:
            hold = self.client.acquire(str(next(_names)), keys, tokens, full=full, load_from=load_from)
        try:
            yield hold
        finally:
            with self.turn:
                self.client.post_release(hold.lease)

    def fetch(
        self,
        keys: bytes,
        tokens: int,
        *,
        full: bool = False,
        until_s: float = math.inf,
        token_ids: bytes | None = None,
    ) -> int:
        """Bring a chain's blocks from storage into the host pool, if there is storage.

        A daemon that hangs is noticed before storage is waited for, and storage is waited for `FETCH_MS` at most, and
        not beyond `until_s` of `time.monotonic`.

        Returns:
            How many blocks from the beginning are in the host pool.
        """
        with self.turn:
            found = self.client.match(keys, tokens, full=full)
        if found == len(keys) // KEY_SIZE_BYTES or time.monotonic() < self.storage_at_s:
            return found
        with self.turn:
            wait_ms = int(min(FETCH_MS, (until_s - time.monotonic()) * 1000))
            if wait_ms <= 0:
                return found
            told = self.client.prefetch(keys, tokens, full=full, deadline_ms=wait_ms, token_ids=token_ids)
            if told.reason == "unavailable":
                self.storage_at_s = time.monotonic() + RETRY_S
                return found
            return self.client.match(keys, tokens, full=full)

    def close(self, *, is_answered: bool = True) -> None:
        """End it. Waits until no thread copies, and for the daemon's reply unless it answers nothing."""
        with self.turn, contextlib.suppress(KvcachedError):
            if is_answered:
                self.client.close()
            else:
                self.client.hang_up()
        self.shard.close()


class Silence:
    """A daemon that does not answer or is lost, for all engines of one process that use it.

    One of them waits for it, and one tells of it, not each of them.

    Attributes:
        ends_at_s: when it is asked again, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.ends_at_s = 0.0
        self._troubles: set[str] = set()  # that were told, and are not over
        self._lost_at_s = -math.inf
        self._turn = threading.Lock()

    @property
    def is_now(self) -> bool:
        """Whether the daemon is left alone."""
        return time.monotonic() < self.ends_at_s

    def note(self, error: KvcachedError) -> bool:
        """Whether a failure is that the daemon does not answer; it is left alone then."""
        is_silent = isinstance(error, (DeadlineExceeded, DaemonSilent))
        if is_silent:
            self.ends_at_s = time.monotonic() + RETRY_S
        return is_silent

    def is_news(self, trouble: str, *, since_s: float | None = None) -> bool:
        """Whether nobody was told of a trouble yet.

        Args:
            trouble: `LOST`, or why the daemon refuses sessions.
            since_s: when the session began that is lost. One that is older than the last loss was lost with it, though
                another engine may have a new one by now.
        """
        with self._turn:
            if since_s is not None and since_s <= self._lost_at_s:
                return False
            is_news = trouble not in self._troubles
            if is_news and trouble == LOST:
                self._lost_at_s = time.monotonic()
            self._troubles.add(trouble)
            return is_news

    def is_over(self, troubles: set[str]) -> bool:
        """Whether somebody was told that the daemon is lost, or of these troubles; an engine has a session now."""
        with self._turn:
            over = self._troubles & {LOST, *troubles}
            self._troubles -= over
            return bool(over)


class OneProcessEngine:
    """Has a session while the daemon answers. Several threads may use it.

    Args:
        identity: what the engine says of itself.
        pages: where its blocks are.
        run_dir: directory of the daemon's sockets; default: `default_run_dir`.
        deadline_ms: limit for one call to the daemon.
        log: where it is written that the daemon is lost or found.
        silence: of the daemon, if other engines of this process use it as well.
    """

    def __init__(
        self,
        identity: EngineIdentity,
        pages: EnginePages,
        *,
        run_dir: str | os.PathLike[str] | None,
        deadline_ms: int,
        log: logging.Logger,
        silence: Silence | None = None,
    ) -> None:
        self._identity, self._pages = identity, pages
        self._run_dir, self._deadline_ms, self._log = run_dir, deadline_ms, log
        self._silence = Silence() if silence is None else silence
        self._instance = new_instance()
        self._session: OneProcessSession | None = None
        self._opening = threading.Lock()
        self._retry_at_s = 0.0
        self._trouble = LOST  # why there is no session
        self._troubles: set[str] = set()  # why there was none since the last one

    @contextlib.contextmanager
    def guarded(self) -> Iterator[OneProcessSession | None]:
        """A session, None if there is none. A failure of the daemon ends the block, most of them also the session."""
        session = None
        try:
            session = self._reached()
        except KvcachedError as error:
            self._give_up(None, error)
        try:
            yield session
        except KvcachedError as error:
            if isinstance(error, RequestError) and not isinstance(error, (Stale, DaemonFailure)):
                self._log.debug("kvcached: a request was refused: %s", error)
            else:
                self._give_up(session, error)

    def close(self) -> None:
        """End the session; what is stored stays."""
        with self._opening:
            session, self._session = self._session, None
        if session is not None:
            session.close(is_answered=not self._silence.is_now)

    def _give_up(self, lost: OneProcessSession | None, error: KvcachedError) -> None:
        is_refused = isinstance(error, RequestError) and error.fault is Fault.CALLER
        with self._opening:
            if self._session is not lost:
                return  # of a session that another thread has given up
            self._session = None
            self._retry_at_s = time.monotonic() + RETRY_S
            if not (is_refused and self._trouble != LOST):  # a refusal may be in other words each time
                self._trouble = str(error) if is_refused else LOST
                self._troubles.add(self._trouble)
            is_news = self._silence.is_news(self._trouble, since_s=None if lost is None else lost.since_s)
            is_answered = not self._silence.note(error)
        level = logging.WARNING if is_news else logging.DEBUG
        # It is tried again in either case: what has to be corrected may be the daemon's configuration.
        if is_refused:
            self._log.log(level, "kvcached: nothing is stored or loaded until this is corrected: %s", error)
        else:
            words = "kvcached: nothing is stored or loaded, and the daemon is tried again every %g s: %s"
            self._log.log(level, words, RETRY_S, error)
        if lost is not None:
            lost.close(is_answered=is_answered)

    def _reached(self) -> OneProcessSession | None:
        """The session, opened if there is none; none while the daemon does not answer.

        Raises:
            KvcachedError: it cannot be opened.
        """
        with self._opening:
            if self._silence.is_now:
                return None
            if self._session is None and time.monotonic() >= self._retry_at_s:
                self._session = self._open()
                if self._silence.is_over(self._troubles):
                    self._log.warning("kvcached: the daemon is back")
                self._trouble = LOST
                self._troubles.clear()
            return self._session

    def _open(self) -> OneProcessSession:
        identity, pages = self._identity, self._pages
        client = OffloadClient.connect(
            self._run_dir,
            engine=identity.engine,
            instance=self._instance,
            keyspace=identity.keyspace,
            label=identity.label[-NAME_LENGTH_MAX:],
            layout=OffloadLayout(identity.block_size, 1, pages.block_bytes, pages.fingerprint),
            deadline_ms=self._deadline_ms,
        )
        try:
            shard = OffloadShard.join(client.session, 0, pages, deadline_ms=self._deadline_ms)
        except BaseException:
            client.hang_up()
            raise
        return OneProcessSession(client, shard)
