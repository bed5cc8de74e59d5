"""A maker of CUDA memory on a driver that tells no UUID."""

from __future__ import annotations

import sys

from kvcached.worker import make_cuda_memory
from kvcached_client.cuda import device
from kvcached_client.cuda.driver import Driver


def no_uuid(driver: Driver, ordinal: int) -> str:
    del driver, ordinal
    return ""


if __name__ == "__main__":
    device._uuid_if_told = no_uuid
    sys.exit(make_cuda_memory.main(sys.argv))
