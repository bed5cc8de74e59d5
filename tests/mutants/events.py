"""Mistakes about what routers are told."""

from __future__ import annotations

import pytest

from kvcached.core.eviction.reuse import ReuseSample
from kvcached.core.slots.announced import Announced
from kvcached.core.slots.slots import DevicePool
from kvcached.core.transfers import prefetch
from kvcached.core.transfers.table import TransferTable
from kvcached.events.peers import Peer
from kvcached.events.stream import EventStream
from kvcached.events.token_book import TokenBook
from kvcached.memory.token_table import TokenTable
from kvcached.recovery import run_dir
from kvcached_client.keys import KeyChain
from tests.mutants.mutant import caught_by, rewrite

_FOLLOWED = "tests/core/test_index_events.py::test_snapshot_and_events_make_the_index"


@caught_by("tests/events/test_stream.py::test_batch_that_is_published_during_a_snapshot_is_behind_its_number")
def snapshot_numbered_too_late(patch: pytest.MonkeyPatch) -> None:
    """A snapshot has the number of the next batch, so that this batch is never applied to it."""
    rewrite(patch, EventStream.snapshot, "self._next - 1", "self._next")


@caught_by("tests/core/test_announced.py::test_blocks_behind_a_fence_are_not_told_as_gone")
def removed_blocks_not_told(patch: pytest.MonkeyPatch) -> None:
    """Routers are not told of blocks that leave beside others that they have never heard of."""
    rewrite(patch, Announced.remove, "elif told:", "elif not count:")


@caught_by(f"{_FOLLOWED}[MixedDriver]")
def later_blocks_not_told(patch: pytest.MonkeyPatch) -> None:
    """Routers are not told of what is committed or loaded behind the first block of a chain."""
    rewrite(patch, DevicePool.note_cached, "self.announced is not None", "self.announced and not blocks.depth")


@caught_by(f"{_FOLLOWED}[StorageHistory]")
def fetched_blocks_not_told(patch: pytest.MonkeyPatch) -> None:
    """Routers are not told of blocks that storage has brought."""
    rewrite(patch, prefetch._insert, "tree.announce_host(run, [Piece(first, piece.end)])", "pass")


@caught_by(f"{_FOLLOWED}[OffloadDriver]")
def stored_blocks_told_too_early(patch: pytest.MonkeyPatch) -> None:
    """Routers are told of blocks whose copy has failed."""
    rewrite(patch, TransferTable.end_store, "if good:\n", "if store.blocks:\n")


@caught_by("tests/events/test_server.py::test_peer_that_reads_no_answers_is_not_read[events]")
def pings_answered_without_a_limit(patch: pytest.MonkeyPatch) -> None:
    """A peer that sends pings and reads nothing takes the daemon's memory."""
    rewrite(patch, Peer._take, "if self.is_full:", "if False:")


@caught_by("tests/core/test_reuse.py::test_blocks_count_by_their_size[4096]")
def sampled_blocks_counted_by_number(patch: pytest.MonkeyPatch) -> None:
    """A block of the sample counts as much as those of every other namespace, of which more or fewer are sampled."""
    rewrite(patch, ReuseSample._take_place, "tree.slabs_per_block * tree.weight", "2 * tree.slabs_per_block")


@caught_by("tests/core/test_reuse.py::test_blocks_count_by_their_size[1024]")
def sampled_blocks_of_the_rate_before_kept(patch: pytest.MonkeyPatch) -> None:
    """Blocks that were sampled more often count for as many as those of the lower rate."""
    rewrite(patch, ReuseSample._make_room, "self._sizes[own] = most.slabs_per_block * most.weight", "pass")


@caught_by("tests/recovery/test_run_dir.py::test_epochs_are_as_far_apart_as_the_starts[1000]")
def epochs_close_after_the_clock_was_set_back(patch: pytest.MonkeyPatch) -> None:
    """The next daemon numbers its events as the last one did."""
    rewrite(patch, run_dir._next_epoch, "before + 1 + since_boot_ms - started_ms", "before + 1")


@caught_by("tests/events/test_token_book.py::test_tokens_are_kept_while_a_tier_has_the_block")
def tokens_erased_with_the_first_copy(patch: pytest.MonkeyPatch) -> None:
    """A block that has moved from the device to the host has no tokens any more."""
    rewrite(patch, TokenBook.erase, "and not space.is_held(key)", "")


@caught_by("tests/events/test_token_book.py::test_tokens_of_known_blocks_are_told")
def tokens_told_of_their_neighbours(patch: pytest.MonkeyPatch) -> None:
    """Where a block without tokens lies between others, these get each other's."""
    rewrite(
        patch, TokenBook.note, "for at, key in enumerate(_split(keys)):", "for at, key in enumerate(_split(keys), -1):"
    )


@caught_by("tests/events/test_token_table.py::test_row_in_which_a_daemon_died_is_none")
def broken_rows_taken_over(patch: pytest.MonkeyPatch) -> None:
    """The tokens that a daemon was writing when it died are told, whatever they are."""
    rewrite(patch, TokenTable.take_over, 'used["mark"] == 1', 'used["mark"] >= 0')


@caught_by("tests/events/test_token_book.py::test_what_was_removed_on_request_is_nowhere")
def removed_prompts_replayed(patch: pytest.MonkeyPatch) -> None:
    """Whoever asks for old messages reads a prompt that was removed on request."""
    rewrite(patch, EventStream._forget, "self._kept.clear()", "pass")


@caught_by("tests/client/test_token_ids.py::test_tokens_of_tenants_and_adapters_stay[salted0]")
def salted_prompts_told(patch: pytest.MonkeyPatch) -> None:
    """Routers are told the tokens of a tenant's prompt."""
    rewrite(patch, KeyChain.__init__, "keeps_tokens and not (lora or salt)", "keeps_tokens")
