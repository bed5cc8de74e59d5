"""A daemon that may open few files: ``python -m tests.daemon.few_descriptors serve …``."""

from __future__ import annotations

import resource

import kvcached.__main__

DESCRIPTORS = 256

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    kvcached.__main__.run()
