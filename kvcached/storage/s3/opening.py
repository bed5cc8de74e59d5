"""Opens the backend `s3`: looks whether the bucket can be used, before the daemon counts on it.

A service that does not compare before it writes is refused: two daemons that clear different namespaces at the same
time would lose one of the clears.

The library takes settings from dozens of variables of the environment. Those that a role needs stay; the others are
taken out of the storage process's environment, so that the configuration alone says where blocks go, and how.
"""

from __future__ import annotations

import os
import time
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvcached.storage.backend import StorageMisconfigured, StorageUnusable
from kvcached.storage.s3.failures import S3Failure
from kvcached.storage.s3.settings import S3Settings
from kvcached.storage.settings import checked

if TYPE_CHECKING:
    from kvcached.storage.s3.backend import S3Storage

T = TypeVar("T")

PACKAGES: Final = "obstore"
#: For all of the first requests.
_TIMEOUT_S: Final = 10.0
#: The least for the last of them, which deletes what the others have written.
_DELETE_TIMEOUT_S: Final = 2.0
#: What the library finds the role of a machine, a task or a Pod by.
_OF_ROLES: Final = frozenset(
    {
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_ENDPOINT_URL_STS",
        "AWS_METADATA_ENDPOINT",
        "AWS_ROLE_ARN",
        "AWS_ROLE_SESSION_NAME",
        "AWS_STS_ENDPOINT",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
    }
)
#: A proxy of http:// would read blocks, and the keys of a role.
_READING_PROXIES: Final = frozenset({"HTTP_PROXY", "ALL_PROXY"})
#: Other processes of the user can read them, and they would be used without a word in the configuration.
_SECRETS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_WRONG_KEYS: Final = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch"})
_OTHER_REGION: Final = frozenset({"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint"})
#: Codes of answers to a condition, from services that have none.
_NO_CONDITIONS: Final = frozenset({"NotImplemented", "InvalidArgument", "MethodNotAllowed"})
_FORBIDDEN: Final = 403
_TO_DELETE: Final = "delete objects (s3:DeleteObject)"
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
    _leave_environment(valid)
    with ExitStack() as undo:
        storage = S3Storage(valid)
        undo.callback(storage.close)
        if not _Trial(storage, valid).succeeds():
            what = f"{valid.service} does not compare before it writes"
            raise StorageMisconfigured(f"s3 storage: {what}: {_REQUIREMENT}")
        undo.pop_all()
    return storage


def _leave_environment(settings: S3Settings) -> None:
    """Take the variables out of this process's environment that would change what the settings say."""
    for name in list(os.environ):
        known = name.upper()
        is_proxy = known in _READING_PROXIES or (known == "HTTPS_PROXY" and settings.is_on_this_machine)
        if is_proxy or (known.startswith("AWS_") and known not in _OF_ROLES):
            del os.environ[name]


class _Trial:
    """The first requests, which have one time limit."""

    def __init__(self, storage: S3Storage, settings: S3Settings) -> None:
        self._storage = storage
        self._settings = settings
        self._until_s = time.monotonic() + _TIMEOUT_S

    def succeeds(self) -> bool:
        """Whether the service compares before it writes.

        Raises:
            StorageUnusable: a request failed.
        """
        self._try(self._storage.look(), "list objects (s3:ListBucket)")
        self._try(self._storage.ask_for_absent(), "list objects (s3:ListBucket)")
        probe = self._storage.probe()
        self._try(probe.delete_before(), _TO_DELETE)
        try:
            is_right = self._try(probe.honours_conditions(), "read and write objects (s3:GetObject, s3:PutObject)")
        except StorageUnusable:
            with suppress(StorageUnusable):  # the first failure says more
                self._try(probe.remove(), _TO_DELETE, _DELETE_TIMEOUT_S)
            raise
        self._try(probe.remove(), _TO_DELETE, _DELETE_TIMEOUT_S)
        return is_right

    def _try(self, work: Coroutine[Any, Any, T], what: str, least_s: float = 0.0) -> T:
        """The result of a request, or what it tells of the settings."""
        settings = self._settings
        try:
            return self._storage.calls.run(work, round(max(self._until_s - time.monotonic(), least_s), 1))
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
    if code == "AccessDenied" or (error.why.status == _FORBIDDEN and not code):
        return f"allow the keys in {keys} to {what} of {settings.prefix}"
    return ""
