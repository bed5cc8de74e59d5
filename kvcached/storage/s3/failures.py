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
#: One of the objects of a DELETE of several: the status is 200. The text of the service stands in other fields.
_NOT_DELETED: Final = re.compile(r'source: DeleteFailed \{\s+path: "[^"]*",\s+code: "(\w{1,100})"')
#: An error with status 200, and an answer of another form. Both are quoted.
_ERROR_IN_ANSWER: Final = "Server returned error response: "
_NO_ANSWER: Final = re.compile(r"Got invalid [\w ]+ response: ")
#: In what the library shows of the error that caused the error: the innermost one stands last.
_CAUSE: Final = re.compile(r'(?:message|error): "([^"]{1,200})"')
#: A name in a list that the library does not take, and then it takes none of that list: with //, /./ or a line break.
_ODD_NAME: Final = re.compile(r'Encountered object with invalid path: .* path: ("(?:[^"\\]|\\.)*")', re.DOTALL)
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
#: The service has refused the request, and will not carry it out.
_REFUSED: Final = frozenset({*range(400, 500), _INSUFFICIENT_STORAGE})
_OK: Final = 200


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
    if (answered := _answer(text)) is not None:
        return answered
    if (odd := _ODD_NAME.search(text)) is not None:
        words = f"what stands beside the object {odd[1]} cannot be listed; delete that object, which is no block"
        return Failure(0, "", words)
    kind, causes = _KIND.search(text), _CAUSE.findall(text)
    said = [*([_KINDS[kind[1]]] if kind else []), *causes[-1:]] or [type(error).__name__, *text.splitlines()[:1]]
    return Failure(0, "", ": ".join(said))


def _answer(text: str) -> Failure | None:
    """What the service has answered; None if it has not."""
    if (kept := _NOT_DELETED.search(text)) is not None:
        return Failure(_OK, kept[1], f"the service refuses to delete objects ({kept[1]})")
    status, code = _STATUS.search(text), _CODE.search(text)
    name = code[1] if code else ""
    words = f" ({name})" if name else ""
    if status is not None:
        return Failure(int(status[1]), name, f"the service answers {status[1]}{status[2].rstrip()}{words}")
    if _ERROR_IN_ANSWER in text:
        return Failure(_OK, name, f"the service answers with an error{words}")
    return Failure(_OK, "", _KINDS["Decode"]) if _NO_ANSWER.search(text) else None


def is_unanswered(outcome: object) -> bool:
    """Whether a request has failed without a refusal, so that the service may have carried it out, or still will.

    Other errors than refusals come from gateways, too, which do not know what becomes of a request that they passed on.
    """
    return isinstance(outcome, BaseException) and failure(outcome).status not in _REFUSED


def result_of(error: BaseException) -> Result:
    """The result for a block whose request failed."""
    why = failure(error)
    is_full = why.status == _INSUFFICIENT_STORAGE or (why.code and _FULL.search(why.code))
    return Result(Outcome.FULL if is_full else Outcome.FAILED, why.words)
