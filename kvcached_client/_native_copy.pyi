# The optional native helper, `_copy.c`. Absent where no compiler was at hand; `batch_copy.py` then does the same.

from array import array

def copy_all(pieces: array[int] | memoryview, destination: int, source: int, /) -> None: ...
def copy_summed(
    pieces: array[int] | memoryview, per_sum: int, destination: int, source: int, /
) -> bytes | None: ...
