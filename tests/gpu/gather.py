"""Scattered pieces moved by a kernel of Triton, which reaches the host's pinned memory itself: a gather, and a scatter.

Only where torch has a device and Triton can be imported. Decision 0037 says why kvcached itself has no such kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import triton
import triton.language as tl

_WORD_BYTES: Final = 8
_WORDS_AT_ONCE: Final = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _move(target, source, order, piece_words, to_order: tl.constexpr, words: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - Triton reads annotations
    """One piece for each program: from its place in `order` to its number, or back."""
    number = tl.program_id(0).to(tl.int64)
    place = tl.load(order + number)
    first = (place if to_order else number) * piece_words
    origin = (number if to_order else place) * piece_words
    for at in range(0, piece_words, words):
        within = at + tl.arange(0, words)
        inside = within < piece_words
        tl.store(target + first + within, tl.load(source + origin + within, mask=inside), mask=inside)


class Gather:
    """Memory on both sides, and the kernel.

    Args:
        size_bytes: on each side.
        piece_bytes: a multiple of 8.
    """

    def __init__(self, size_bytes: int, piece_bytes: int) -> None:
        self._pieces = size_bytes // piece_bytes
        self._piece_words = piece_bytes // _WORD_BYTES
        words = self._pieces * self._piece_words
        self.size_bytes = words * _WORD_BYTES
        self._device = torch.arange(words, dtype=torch.int64, device="cuda")
        self._host = torch.zeros(words, dtype=torch.int64, pin_memory=True)
        self._order = torch.randperm(self._pieces, device="cuda")

    def to_host(self) -> None:
        """Gather scattered pieces of the device into one run of the host."""
        self._run(self._host, self._device, to_order=False)

    def to_device(self) -> None:
        """Scatter one run of the host to pieces of the device."""
        self._run(self._device, self._host, to_order=True)

    def is_right(self) -> bool:
        """Whether a gather gives what it should, and a scatter of that gives all back."""
        before = self._device.clone()
        self.to_host()
        expected = before.view(self._pieces, -1)[self._order].view(-1).cpu()
        is_gathered = torch.equal(self._host, expected)
        self._device.zero_()
        self.to_device()
        return is_gathered and torch.equal(self._device, before)

    def _run(self, target: torch.Tensor, source: torch.Tensor, *, to_order: bool) -> None:
        kernel: Any = _move
        kernel[(self._pieces,)](
            target, source, self._order, self._piece_words, to_order=to_order, words=_WORDS_AT_ONCE, num_warps=4
        )
        torch.cuda.synchronize()


def directions(gather: Gather) -> dict[str, Callable[[], None]]:
    """What is measured of it."""
    return {"to_host": gather.to_host, "to_device": gather.to_device}
