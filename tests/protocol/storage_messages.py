"""Messages about storage with every field set, for the golden file."""

from __future__ import annotations

from kvcached_client.protocol.engine import Prefetch, Prefetched, Reply, Request, StorageControl, StorageReport

#: By their names in the golden file: header and frames.
STORAGE_REQUESTS: dict[str, tuple[Request, list[bytes]]] = {
    "prefetch": (
        Prefetch(
            id=40, epoch=4, tokens=300, full=True, stop="wait_complete", deadline_ms=5000, prefill_tokens_per_s=1500.5
        ),
        [bytes(range(16)) + bytes(range(16, 32))],
    ),
    "prefetch-tenant": (Prefetch(id=44, tokens=300, tenant="free-7"), [bytes(range(16))]),
    "storage_control": (StorageControl(id=41, action="detach"), []),
}
STORAGE_REPLIES: dict[str, tuple[Reply, list[bytes]]] = {
    "prefetched": (Prefetched(id=40, blocks=300, fetched=299, is_over=True, reason="fetched"), []),
    "storage_report": (
        StorageReport(
            id=41,
            backend="disk",
            state="suspended",
            why="5 failures in a row",
            backup="every",
            restarts=1,
            blocks=70_000,
            size_bytes=1 << 40,
            capacity_bytes=-1,
            counters={"fetched_blocks": 300},
        ),
        [],
    ),
}
