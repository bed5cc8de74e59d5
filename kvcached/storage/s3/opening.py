"""Opens the backend `s3`: looks whether the bucket can be used, before the daemon counts on it.

A service that does not compare before it writes is refused: two daemons that clear different namespaces at the same
time would lose one of the clears.
"""

from __future__ import annotations

import os
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvcached.storage.backend import StorageMisconfigured, StorageUnusable
from kvcached.storage.s3.failures import S3Failure
from kvcached.storage.s3.settings import S3Settings
from kvcached.storage.settings import checked

if TYPE_CHECKING:
    from kvcached.storage.s3.backend import S3Storage

T = TypeVar("T")

PACKAGES: Final = "obstore"
#: For the first list, and for the first writes.
_TIMEOUT_S: Final = 10.0
#: Other processes of the user can read them, and they would be used without a word in the configuration.
_SECRETS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_WRONG_KEYS: Final = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch"})
_OTHER_REGION: Final = frozenset({"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint"})
#: Codes of answers to a condition, from services that have none.
_NO_CONDITIONS: Final = frozenset({"NotImplemented", "InvalidArgument", "MethodNotAllowed"})
_FORBIDDEN: Final = 403
_REQUIREMENT: Final = (
    "it must refuse a PUT whose If-Match or If-None-Match does not hold, and no other; use another service, or a newer"
    " version of it"
)


def open_s3(settings: dict[str, object]) -> S3Storage:
    """The backend `s3`.

    Raises:
        StorageMisconfigured: a setting, a key or a right is wrong, or the service does not compare before it writes.
        StorageUnusable: the service does not answer now.
    """
    valid = checked(S3Settings, settings, "s3")
    if valid.credentials_file is None and (name := next(filter(os.environ.get, _SECRETS), "")):
        what = f"keys in the environment ({name}) are not used"
        fix = "write them to a file, and name it as credentials_file; or unset the variable, to use the machine's role"
        raise StorageMisconfigured(f"s3 storage: {what}; {fix}")
    try:
        from kvcached.storage.s3.backend import S3Storage  # noqa: PLC0415 - needs an optional package
    except ImportError as error:
        raise StorageMisconfigured(f"s3 storage needs the package {PACKAGES}: pip install {PACKAGES}") from error
    with ExitStack() as undo:
        storage = S3Storage(valid)
        undo.callback(storage.close)
        storage.is_empty = _tried(storage, valid, storage.holds_nothing(), "list objects")
        is_right = _tried(storage, valid, storage.honours_conditions(), "write and delete objects")
        if not is_right:
            what = f"{valid.service} does not compare before it writes"
            raise StorageMisconfigured(f"s3 storage: {what}: {_REQUIREMENT}")
        undo.pop_all()
    return storage


def _tried(storage: S3Storage, settings: S3Settings, work: Coroutine[Any, Any, T], what: str) -> T:
    """The result of a first request, or what it tells of the settings."""
    try:
        return storage.calls.run(work, _TIMEOUT_S)
    except S3Failure as error:
        fix = _fix(error, settings, what)
        why = f"s3 storage: bucket {settings.bucket} of {settings.service}: {error}"
        if fix:
            raise StorageMisconfigured(f"{why}; {fix}") from error
        if settings.credentials_file is None and not error.why.status:
            why += "; if this machine has no role for S3, name a credentials_file"
        raise StorageUnusable(why) from error


def _fix(error: S3Failure, settings: S3Settings, what: str) -> str:
    """What to do about a failure that stays as long as the settings do; empty for one that may pass."""
    code, keys = error.why.code, settings.credentials_file or "the role of this machine"
    if code == "NoSuchBucket":
        return "create it, or name another bucket"
    if code in _WRONG_KEYS:
        return f"correct the keys in {keys}"
    if code in _OTHER_REGION:
        return "set the region of the bucket"
    if code in _NO_CONDITIONS:
        return _REQUIREMENT
    if error.why.status == _FORBIDDEN and code in {"AccessDenied", ""}:
        return f"allow the keys in {keys} to {what} of {settings.prefix}"
    return ""
