"""``python -m tests.recovery.supervised <policy as JSON> <command>...``: a supervisor of any command.

The policy may also name the socket of a keeper, and a command that looks whether a restart would succeed.
"""

from __future__ import annotations

import json
import sys

from kvcached.log import set_up_logging
from kvcached.recovery.supervise import Policy, supervise

if __name__ == "__main__":
    set_up_logging("info", "plain")
    policy = json.loads(sys.argv[1])
    keeper, check = policy.pop("keeper", ""), policy.pop("check", ())
    sys.exit(supervise(sys.argv[2:], Policy(**policy), keeper, check))
