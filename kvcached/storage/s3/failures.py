"""What a service or the way to it says of a request that failed, in a few words that hold no secret.

A service may quote the request in its answer, with keys or what was signed with them: of an answer only the status and
the code are told.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from kvcached.storage.backend import Outcome, Result

_STATUS: Final = re.compile(r"non-2xx status code: (\d{3})([A-Za-z -]*)")
_CODE: Final = re.compile(r"<Code>(\w{1,100})</Code>")
#: In what the library shows of the error that caused the error: the innermost one stands last.
_CAUSE: Final = re.compile(r'(?:message|error): "([^"]{1,200})"')
_KIND: Final = re.compile(r"kind: (Timeout|Connect|Decode|Interrupted)\b")
_KINDS: Final = {
    "Timeout": "no answer in time",
    "Connect": "no connection",
    "Decode": "an answer that is none of S3",
    "Interrupted": "the connection was lost",
}
#: Codes of services that have no room: of AWS's directory buckets, Ceph, MinIO and others.
_FULL: Final = re.compile(r"Quota|StorageFull|InsufficientStorage|NoSpace|StorageLimit")
_INSUFFICIENT_STORAGE: Final = 507


class Failure(NamedTuple):
    """Why a request failed: status and code of the answer, 0 and "" if there was none; and words for a log."""

    status: int
    code: str
    words: str


class S3Failure(Exception):
    """A request failed.

    Attributes:
        why: the message, and what the service answered.
    """

    def __init__(self, why: Failure) -> None:
        super().__init__(why.words)
        self.why = why


def failure(error: BaseException) -> Failure:
    """What an error of the library, or of a call, means."""
    if isinstance(error, S3Failure):
        return error.why
    text = str(error)
    if isinstance(error, TimeoutError):
        return Failure(0, "", text or "no answer in time")
    answer, code = _STATUS.search(text), _CODE.search(text)
    if answer is not None:
        name = code[1] if code else ""
        words = f"{answer[1]}{answer[2].rstrip()}" + (f" ({name})" if name else "")
        return Failure(int(answer[1]), name, f"the service answers {words}")
    kind, causes = _KIND.search(text), _CAUSE.findall(text)
    said = [*([_KINDS[kind[1]]] if kind else []), *causes[-1:]] or [type(error).__name__, *text.splitlines()[:1]]
    return Failure(0, "", ": ".join(said))


def result_of(error: BaseException) -> Result:
    """The result for a block whose request failed."""
    why = failure(error)
    is_full = why.status == _INSUFFICIENT_STORAGE or (why.code and _FULL.search(why.code))
    return Result(Outcome.FULL if is_full else Outcome.FAILED, why.words)
