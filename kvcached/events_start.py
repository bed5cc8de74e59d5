"""Starts the sockets of KV cache events, as they are configured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from functools import lru_cache, partial

from kvcached.config.schema import Config
from kvcached.core.cache import Cache
from kvcached.events.server import Endpoints, EventServer
from kvcached.events.stream import EventStream
from kvcached.events.token_book import TokenBook
from kvcached.memory.token_table import TABLE_PREFIX, TokenTable
from kvcached.process.seqpacket import SocketFile
from kvcached.recovery.fd_store import remove, store
from kvcached.service.service import Service


def open_book(config: Config, cache: Cache, kept: Mapping[int, TokenTable], parts: ExitStack) -> TokenBook | None:
    """The tokens that routers may know, with what an earlier daemon knew of the blocks that this one has.

    Args:
        config: which namespaces allow it.
        cache: with the blocks that were taken over.
        kept: tables of the earlier daemon, by the size of their blocks. They are closed where nobody needs them.
        parts: closes the book.
    """
    table = config.events
    if table is None or not any(rule.token_ids for rule in table.namespace):
        for size, each in kept.items():
            _give_up(size, each)
        return None
    book = TokenBook(lru_cache(table.may_tell_tokens), _new_table, _give_up, kept)
    parts.callback(book.close)
    book.take_over(cache.announced())
    return book


def _pass_over(cache: Cache, book: TokenBook | None) -> None:
    """Nobody is told of changes; the next daemon may tell the tokens of the blocks that it takes over."""
    if book is not None:
        book.catch_up()
        book.forgotten()
    cache.index_changes.clear()
    if book is not None:
        book.taken()
        while book.has_left:
            book.erase(cache.announced)


def _new_table(block_size: int) -> TokenTable:
    """A table that the service manager keeps in place of any other for blocks of this size."""
    table, name = TokenTable.create(block_size), f"{TABLE_PREFIX}{block_size}"
    remove(name)
    store(name, table.descriptor)
    return table


def _give_up(block_size: int, table: TokenTable) -> None:
    """Nobody needs a table any more, in this daemon and the next."""
    remove(f"{TABLE_PREFIX}{block_size}")
    table.close()


async def start_events(
    config: Config, cache: Cache, service: Service, book: TokenBook | None, parts: AsyncExitStack
) -> list[SocketFile]:
    """Publish what changes in the index from now on, if the configuration says so; the files of its sockets.

    Raises:
        OSError: an endpoint cannot be bound; nothing is published, and the text begins with the key in `[events]`.
    """
    table = config.events
    if table is None:
        return []
    stream = EventStream(
        cache.index_changes, cache.announced, topic=table.topic, epoch=cache.epoch, buffer_bytes=table.buffer_bytes,
        now_s=time.time, book=book, form=table.block_hashes, topics=lru_cache(table.topics),
    )  # fmt: skip
    server = EventServer(stream, Endpoints(*table.endpoints(config.run_dir)))
    parts.callback(server.close)
    try:
        await server.start()
    except OSError:
        server.close()
        service.index_changed = partial(_pass_over, cache, book)  # nobody takes them
        raise
    service.index_changed = server.poke
    return server.files
