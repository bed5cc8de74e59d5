"""The connector's announcements as vLLM's KV cache events, of the medium CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvcached_client.vllm.scheduling.announcements import Announcement, StoredBlocks
from kvcached_client.vllm.settings import VllmConfig

#: vLLM is untyped here.
VllmRequest: TypeAlias = Any


def publishes_events(config: VllmConfig) -> bool:
    """Whether vLLM publishes events of its caches."""
    events = config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def cache_events(announcements: Iterable[Announcement], block_size: int) -> Iterator[BlockStored | BlockRemoved]:
    """VLLM's events for the connector's announcements."""
    for announcement in announcements:
        if isinstance(announcement, StoredBlocks):
            yield _stored(announcement.request, announcement.start, announcement.stop, block_size)
        else:
            hashes = [maybe_convert_block_hash(each) for each in announcement.hashes]
            yield BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=0)


def _stored(request: VllmRequest, start: int, stop: int, block_size: int) -> BlockStored:
    """The event that vLLM itself would publish for the same blocks on the device."""
    hashes = request.block_hashes
    extra_keys, item = [], 0
    for depth in range(start, stop):
        keys, item = generate_block_hash_extra_keys(request, depth * block_size, (depth + 1) * block_size, item)
        extra_keys.append(keys)
    lora = request.lora_request
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(each) for each in hashes[start:stop]],
        parent_block_hash=maybe_convert_block_hash(hashes[start - 1]) if start else None,
        token_ids=list(request.all_token_ids[start * block_size : stop * block_size]),
        block_size=block_size,
        lora_id=None if lora is None else lora.adapter_id,
        medium=MEDIUM_CPU,
        lora_name=None if lora is None else lora.name,
        extra_keys=to_event_extra_keys(extra_keys),
        group_idx=0,
        session_id=request.session_id,
    )
