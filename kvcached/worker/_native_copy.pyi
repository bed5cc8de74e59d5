# The optional native helper, `_copy.c`. Absent where no compiler was at hand; `batch_copy.py` then does the same.

from array import array

def copy_all(pieces: array[int], destination: int, source: int, /) -> None: ...
