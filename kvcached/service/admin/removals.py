"""The request to remove one prefix: from memory at once, and from storage before the answer, or its deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

from kvcached.core.cache import Cache
from kvcached.core.removal import Removal
from kvcached.events.token_book import TokenBook
from kvcached.service.pending import Answer, PendingReplies, PendingReply, Respond, Wait
from kvcached.service.replica import Replica, resolve_namespace
from kvcached.service.state_writer import HostClaims
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol import engine as wire
from kvcached_client.types import KEY_SIZE_BYTES

#: As `StorageVerbs.delete`.
DeleteStored = Callable[[bytes, int, bytes, Callable[[int, str], None]], None]

_log: Final = logging.getLogger(__name__)


class PrefixRemovals:
    """Serves it.

    Args:
        claims: writes the headers of the host pool.
        delete_stored: has blocks deleted from storage.
        book: the tokens that routers may know.
    """

    def __init__(
        self,
        cache: Cache,
        replicas: Mapping[str, Replica],
        pending: PendingReplies,
        claims: HostClaims,
        delete_stored: DeleteStored,
        book: TokenBook | None,
    ) -> None:
        self._cache = cache
        self._replicas = replicas
        self._pending = pending
        self._claims = claims
        self._delete_stored = delete_stored
        self._book = book

    def forget(self, _: bytes, request: wire.ForgetPrefix, frames: list[bytes], respond: Respond) -> Answer | None:
        """Remove what is free. The headers are gone before the reply: no later daemon finds the blocks in memory.

        Raises:
            RequestError: nothing is to be removed, no such namespace, or too many requests wait for storage.
            Refusal: the namespace is being cleared.
        """
        keys, start = frames[0], request.from_block
        if start * KEY_SIZE_BYTES >= len(keys):
            what = f"a prompt of {len(keys) // KEY_SIZE_BYTES} blocks, of which {start} stay"
            raise request_error(ErrorCode.BAD_VALUE, what, "send the keys of more full blocks, or keep fewer")
        namespace = resolve_namespace(self._cache, self._replicas, request.target)
        removal = self._cache.removals.remove(namespace.tree, keys, start)
        for tree in removal.trees:
            self._claims.forget(tree, removal.keys)
            if self._book is not None:
                self._book.forget(tree.namespace, removal.keys)
        fields = {"device": removal.device, "host": removal.host, "in_use": removal.in_use, "target": request.target}
        _log.info("prefix removed from %(target)s: %(device)d + %(host)d copies; %(in_use)d blocks in use", fields)

        answers: list[Answer] = []

        def ask(*, is_last: bool) -> Answer | None:
            late = f"it has not answered within {request.deadline_ms} ms, and goes on"
            return answers[0] if answers else _answer(request, removal, 0, late) if is_last else None

        def deleted(count: int, why: str) -> None:
            self._cache.removals.deleted(removal, keys, start)
            answers.append(_answer(request, removal, count, why))
            self._pending.done(reply, answers[0])

        reply = PendingReply(Wait.STORAGE, request, respond, ask)
        generation = self._cache.offload.namespaces.generation_of(namespace.tree) or 0
        self._delete_stored(namespace.root, generation, removal.keys, deleted)
        return self._pending.wait(reply, request.deadline_ms)


def _answer(request: wire.ForgetPrefix, removal: Removal, stored: int, why: str) -> Answer:
    return Answer(
        wire.PrefixForgotten(
            id=request.id,
            device=removal.device,
            host=removal.host,
            stored=stored,
            in_use=removal.in_use,
            left_in_storage=why,
        )
    )
