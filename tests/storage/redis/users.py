"""The user that docs/storage.md tells an administrator to make, and all that a daemon does as it."""

from __future__ import annotations

import re

from kvcached.storage.backend import DONE, Outcome, Storage
from tests.project.source_tree import ROOT
from tests.storage.disks import get, put
from tests.storage.values import KIND, TIMEOUT_S, key

PASSWORD = "correct horse"  # noqa: S105 - of servers that end with the test


def documented_user() -> list[str]:
    """The command in docs/storage.md that makes a user, with a password."""
    (line,) = re.findall(r"^ACL SETUSER .*$", (ROOT / "docs/storage.md").read_text(), re.MULTILINE)
    return [each.replace(">PASSWORD", f">{PASSWORD}") for each in line.split()]


def whole_use(storage: Storage) -> bool:
    """All that a daemon does; False where blocks fail or nothing is known of the server."""
    version = storage.write_record(b"record", b"", timeout_s=TIMEOUT_S)
    assert storage.read_record(timeout_s=TIMEOUT_S) == (b"record", version)
    works = put(storage, 1, 2) == [Outcome.DONE] * 2 and get(storage, 1) == DONE
    works &= storage.exists([key(1)], timeout_s=TIMEOUT_S) == [True]
    works &= storage.delete([key(1)], timeout_s=TIMEOUT_S) == 1
    works &= storage.clear(KIND.prefix(), timeout_s=TIMEOUT_S) == 1
    return works and storage.usage().size_bytes > 0
