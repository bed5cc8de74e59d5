"""What an engine touches of its pool when it writes rows: ``python -m tests.gpu.writes``.

The example engine writes into K or V alone, which is not contiguous, in torch's deterministic mode. A write that takes
a copy of all of it, and brings that back, loses what was loaded meanwhile: torch's memory shows whether there was a
copy. JSON on stdout; status 1 if there was. Where torch has no CUDA device, nothing is tried.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from examples.llama_engine.attention import write_rows

_SLOTS: Final = 4096
_BLOCK_SHAPE: Final = (2, 16, 8, 64)  #: K and V, tokens, heads, what a head has of a token
#: What indices and the like may take.
_RISE_BYTES_MAX: Final = 1 << 20


def report() -> dict[str, Any]:
    """How much memory each way to write a row has taken; the pool's K has 128 MiB."""
    if not torch.cuda.is_available():
        return {"ok": True, "ran": False}
    pages = torch.zeros((_SLOTS, *_BLOCK_SHAPE), device="cuda")[:, 0]
    places = torch.tensor([7], device="cuda"), torch.tensor([3], device="cuda")
    rows = torch.ones((1, *_BLOCK_SHAPE[2:]), device="cuda")
    torch.use_deterministic_algorithms(mode=True)
    ours = _rise(lambda: write_rows(pages, places, rows))
    plain = _rise(lambda: pages.index_put_(places, rows))
    is_right = bool(pages[7, 3].eq(1).all()) and int(pages.count_nonzero()) == rows.numel()
    return {
        "ok": ours <= _RISE_BYTES_MAX and is_right,
        "ran": True,
        "taken_bytes": ours,
        "taken_by_index_put_bytes": plain,
        "written": is_right,
    }


def _rise(write: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    write()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


def main() -> int:
    """Tell, and judge."""
    found = report()
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
