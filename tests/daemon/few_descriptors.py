"""A daemon that may open few files: ``python -m tests.daemon.few_descriptors serve …``."""

from __future__ import annotations

import os
import resource

import kvcached.__main__

#: Of its environment; without it, the daemon may open as many as stand here.
VARIABLE = "OPEN_FILES"
DESCRIPTORS = 320

if __name__ == "__main__":
    limit = int(os.environ.get(VARIABLE, DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    kvcached.__main__.run()
