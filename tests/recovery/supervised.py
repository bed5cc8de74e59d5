"""``python -m tests.recovery.supervised <policy as JSON> <command>...``: a supervisor of any command."""

from __future__ import annotations

import json
import sys

from kvcached.log import set_up_logging
from kvcached.recovery.supervise import Policy, supervise

if __name__ == "__main__":
    set_up_logging("info", "plain")
    sys.exit(supervise(sys.argv[2:], Policy(**json.loads(sys.argv[1]))))
