"""Mistakes of the client's part of the host pool, which workers and engines share."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from kvcached_client.aio.client import AsyncClient
from kvcached_client.aio.lease import AsyncLease
from kvcached_client.blocks import header, mapping
from kvcached_client.blocks.copy import MemoryCopier
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.layout import Layout
from kvcached_client.blocks.transfers import BlockTransfers
from kvcached_client.keys import KeyChain
from kvcached_client.transport.channel import Channel
from kvcached_client.transport.prompts import AcquiredPrompts
from tests.mutants.mutant import caught_by, rewrite


@caught_by("tests/client/test_host_header.py::test_claim_outlasts_invalidation")
def claim_lost_while_its_slot_is_written(patch: pytest.MonkeyPatch) -> None:
    """A writer that begins erases who is writing: after a restart nothing says that the slot is in use."""
    rewrite(patch, header.invalidate, "if place[:_FIRST_WRITE_END] != CLAIM_START:\n    place", "place")


@caught_by("tests/client/test_host_header.py::test_header_is_whole_or_not_there")
def header_begins_before_it_is_whole(patch: pytest.MonkeyPatch) -> None:
    """The bytes that make a header valid are written before the rest of it."""
    rest = "place[_FIRST_WRITE_END:] = header[_FIRST_WRITE_END:]"
    start = "place[:_FIRST_WRITE_END] = header[:_FIRST_WRITE_END]"
    rewrite(patch, header.write, f"{rest}\n{start}", f"{start}\n{rest}")


@caught_by("tests/client/test_block_transfers.py::test_headers_are_gone_while_blocks_are_overwritten")
def header_written_before_its_block(patch: pytest.MonkeyPatch) -> None:
    """A shard says that a block is there before it has copied it."""
    name = "host_header.BlockName(works[0].names.keys[:16], b'', 0)"
    early = f"host_header.pack(self._kind(jobs[0]), {name}, bytes(16), epoch, jobs[0].transfer)"
    old = "host_header.invalidate(memory[place : place + HEADER_BYTES])"
    rewrite(patch, BlockTransfers.store_all, old, f"host_header.write(memory[place : place + HEADER_BYTES], {early})")


@caught_by("tests/worker/test_transfers.py::test_headers_are_gone_while_blocks_are_overwritten")
def header_valid_while_it_is_overwritten(patch: pytest.MonkeyPatch) -> None:
    """A host slot is believed to hold its old block while a new one is written into it."""
    rewrite(patch, BlockTransfers.store_all, "host_header.invalidate(memory[place : place + HEADER_BYTES])", "pass")


@caught_by("tests/worker/test_transfers.py::test_layers_are_told_after_their_bytes")
def layer_told_before_its_bytes(patch: pytest.MonkeyPatch) -> None:
    """A load tells of a layer before it is copied."""
    copy = "copy_all(batch.pieces, batch.destination, batch.source)"
    rewrite(patch, MemoryCopier.copy, f"{copy}\nyield batch", f"yield batch\n{copy}")


@caught_by("tests/client/test_block_transfers.py::test_block_that_is_overwritten_while_it_is_read_is_reported")
def load_looks_at_headers_once(patch: pytest.MonkeyPatch) -> None:
    """A load that was overtaken by a store into its slots is believed."""
    rewrite(patch, BlockTransfers.load, "bad.update(_changed(before, self._read(work.headers)))", "pass")


@caught_by("tests/worker/test_replicated.py::test_a_block_is_stored_once_and_loaded_by_every_shard")
def replicated_block_written_by_nobody(patch: pytest.MonkeyPatch) -> None:
    """Of blocks that all shards hold alike, each shard leaves the last of its share to the next one."""
    rewrite(patch, HostGeometry.share, "(blocks * shard // self.shards,", "(-(-blocks * shard // self.shards),")


@caught_by("tests/daemon/test_replicated.py::test_host_pool_holds_each_block_once_for_all_shards")
def replicated_blocks_held_by_each_shard(patch: pytest.MonkeyPatch) -> None:
    """The host pool holds blocks that are the same on all shards once for each."""
    patch.setattr(Layout, "replicated", False)


@caught_by("tests/client/test_known_prompts.py::test_chain_that_was_made_anew_continues_the_earlier_prompt")
def any_earlier_prompt_continued(patch: pytest.MonkeyPatch) -> None:
    """A prompt is taken for the next turn of any conversation that is not longer."""
    rewrite(patch, AcquiredPrompts.known_blocks, " and last == _last_key(keys, blocks)", "")


@caught_by("tests/keys/test_chain.py::test_forks_share_keys_and_nothing_else")
def forks_grow_together(patch: pytest.MonkeyPatch) -> None:
    """The keys behind those that forks share are the same object in both."""
    rewrite(patch, KeyChain.fork, "self._keys.copy(), self", "self._keys, self")


@caught_by("tests/client/test_forked_mappings.py::test_forked_child_that_drops_the_pool_keeps_its_own_memory")
def forked_child_unmaps_its_own_memory(patch: pytest.MonkeyPatch) -> None:
    """A forked child that drops its parent's pool unmaps what lies at the pool's addresses in the child."""
    rewrite(patch, mapping._unmap, "os.getpid() == process_id", "process_id")


@caught_by("tests/transformers/test_weights.py::test_dynamically_quantized_model_is_refused")
def weights_beside_parameters_do_not_count(patch: pytest.MonkeyPatch) -> None:
    """Models share KV that differ only in weights which they keep in packed parameters."""
    rewrite(patch, _of(patch, "weights")._weights, "if name not in seen:", "if False:")


@caught_by("tests/transformers/test_caches.py::test_cache_whose_layers_hold_fewer_tokens_is_refused")
def last_tokens_stored_as_the_first(patch: pytest.MonkeyPatch) -> None:
    """Of a cache that holds only the last tokens in its tensors, these are stored as the beginning."""
    rewrite(patch, _of(patch, "staging").Staging.fits, " if each.shape[2] >= tokens", "")


@caught_by("tests/transformers/test_refusals.py::test_models_of_images_or_sound_are_refused")
def images_in_other_parts_accepted(patch: pytest.MonkeyPatch) -> None:
    """Models are taken for models of text unless their configuration has a part for vision or for audio."""
    parts = "name in ('vision_config', 'audio_config')"
    rewrite(patch, _of(patch, "refusals")._inputs, "is_part or name.startswith(_OTHER_TOKENS)", parts)


def _of(patch: pytest.MonkeyPatch, module: str) -> Any:
    """A module of the client's part for transformers, which takes seconds to import."""
    # transformers imports anyio before pytest, which looks for a plugin in it, and warns.
    patch.setenv("PYTEST_ADDOPTS", "-Wignore::pytest.PytestAssertRewriteWarning")
    return import_module(f"kvcached_client.transformers.{module}")


@caught_by("tests/client/test_connection.py::test_loop_goes_on_while_the_daemon_reads_nothing")
def event_loop_waits_for_a_full_socket(patch: pytest.MonkeyPatch) -> None:
    """Every call of an async client stops the loop while the daemon reads nothing."""
    rewrite(patch, Channel.never_wait, "self._never_waits = True", "pass")


@caught_by("tests/client/test_aio_places.py::test_calls_without_a_place_wait_for_one_in_their_order")
def event_loop_makes_any_number_of_calls(patch: pytest.MonkeyPatch) -> None:
    """Calls beyond what the channel can have pending fail, releases too: their leases stay."""
    rewrite(patch, AsyncClient.__init__, "asyncio.Semaphore(CALLS_MAX)", "asyncio.Semaphore(1 << 30)")


@caught_by("tests/client/test_aio.py::test_release_that_is_cancelled_before_its_turn_is_sent")
def cancelled_release_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A lease whose release is cancelled while it waits for its turn is never given back."""
    rewrite(patch, AsyncLease._carry_out, "self._owed.append(steps)", "pass")
