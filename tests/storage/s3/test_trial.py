"""What the backend `s3` tries when it opens, and what it leaves behind where a try fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcached.storage.backend import StorageMisconfigured, StorageUnusable
from kvcached.storage.s3 import opening
from kvcached.storage.s3.failures import S3Failure
from kvcached.storage.s3.opening import open_s3
from tests.storage.s3.service import FakeS3, fake_s3
from tests.storage.s3.test_opening import own_certificate, refusal
from tests.storage.values import TIMEOUT_S, key, stored

LIMIT_S, DELETE_LIMIT_S, AT_MOST_S = 1.0, 0.5, 4.0


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what whoever runs the tests has; it comes back, though an opening takes variables out."""
    for name in list(os.environ):
        if name.startswith("AWS_") or name.upper().endswith("_PROXY"):
            monkeypatch.delenv(name)


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    with fake_s3() as service:
        yield service


def put_of_the_probe(number: int) -> Callable[[str, str], bool]:
    """Picks one of its writes, counted from 0, and not its repetition."""
    seen = [0]

    def is_it(method: str, name: str) -> bool:
        if method != "PUT" or "/probe/" not in name:
            return False
        seen[0] += 1
        return seen[0] == number + 1

    return is_it


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("plan", ["lost", (503, "SlowDown"), (500, "InternalError")])
def test_lost_answer_is_no_refusal(tmp_path: Path, fake: FakeS3, number: int, plan: str | tuple[int, str]) -> None:
    """Whichever answer to a write of the probe is lost, the service is opened, and nothing stays there."""
    fake.plan.append(plan)
    fake.is_planned = put_of_the_probe(number)

    open_s3(fake.settings(tmp_path)).close()

    assert not fake.plan
    assert fake.objects == {}


@pytest.mark.parametrize("number", range(4))
def test_failed_write_leaves_nothing(tmp_path: Path, fake: FakeS3, number: int) -> None:
    """Whichever write of the probe fails for good, though the service has done it, its object is deleted."""
    fake.plan.extend(["lost"] * 3)
    seen = put_of_the_probe(number)
    begun: list[bool] = []

    def is_planned(method: str, name: str) -> bool:
        if method == "PUT" and (begun or seen(method, name)):
            begun.append(True)
        return method == "PUT" and bool(begun)

    fake.is_planned = is_planned

    assert "500" in refusal(fake.settings(tmp_path), StorageUnusable)
    assert fake.objects == {}


def test_who_may_not_delete_leaves_nothing(tmp_path: Path, fake: FakeS3) -> None:
    """A missing right to delete, which a service answers with status 200, is told once, by name, with no other text."""
    fake.refused_deletes = "AccessDenied"

    said = refusal(fake.settings(tmp_path))

    assert "the service refuses to delete objects (AccessDenied); allow the keys in" in said
    assert "to delete objects (s3:DeleteObject) of kvcached/" in said
    assert "secret" not in said
    assert fake.objects == {}


def test_refused_deletes_are_told_by_their_code(tmp_path: Path, fake: FakeS3) -> None:
    """What a service says when it does not delete is not repeated: it may quote keys."""
    storage = open_s3(fake.settings(tmp_path))
    storage.put([stored(1)], timeout_s=TIMEOUT_S)

    for code, told in (
        ("AccessDenied", "the service refuses to delete objects (AccessDenied)"),
        ("InternalError", "the service answers with an error (InternalError)"),
    ):
        fake.refused_deletes = code
        with pytest.raises(S3Failure) as error:
            storage.delete([key(1)], timeout_s=TIMEOUT_S)
        assert str(error.value) == told
        with pytest.raises(S3Failure) as error:
            storage.clear(b"", timeout_s=TIMEOUT_S)
        assert str(error.value) == told
    storage.close()


def test_hung_service_ends_the_opening(tmp_path: Path, fake: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that hangs after the first write costs the limit; an opening much later deletes what was left."""
    monkeypatch.setattr(opening, "_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(opening, "_DELETE_TIMEOUT_S", DELETE_LIMIT_S)
    fake.plan.extend(["hung"] * 9)
    fake.is_planned = lambda method, name: method in {"PUT", "POST"} and bool(fake.objects)
    began_s = time.monotonic()

    assert "no answer within" in refusal(fake.settings(tmp_path), StorageUnusable)

    assert LIMIT_S * 0.9 < time.monotonic() - began_s < AT_MOST_S
    (left,) = fake.objects
    fake.plan.clear()
    open_s3(fake.settings(tmp_path)).close()
    assert list(fake.objects) == [left]  # it may be of an opening that goes on at the same time
    fake.modified[left] = "2026-11-28T10:59:59.000Z"
    open_s3(fake.settings(tmp_path)).close()
    assert fake.objects == {}


def test_service_that_denies_absence_is_refused(tmp_path: Path, fake: FakeS3) -> None:
    """A service that answers 403 to a question for an absent block would fail every one."""
    fake.plan.append((403, ""))
    fake.is_planned = lambda method, name: method == "HEAD"

    assert "to list objects (s3:ListBucket) of kvcached/" in refusal(fake.settings(tmp_path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_CONDITIONAL_PUT", "disabled"),
        ("AWS_S3_EXPRESS", "true"),
        ("AWS_DISABLE_BULK_DELETE", "true"),
        ("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms"),
        ("HTTP_PROXY", "http://127.0.0.1:1"),
        ("http_proxy", "http://127.0.0.1:1"),
        ("ALL_PROXY", "http://127.0.0.1:1"),
        ("all_proxy", "http://127.0.0.1:1"),
    ],
)
def test_environment_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: FakeS3, name: str, value: str
) -> None:
    """Settings of the library in the environment, and proxies that could read, change nothing."""
    monkeypatch.setenv(name, value)

    open_s3(fake.settings(tmp_path)).close()

    assert name not in os.environ


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY"])
def test_loopback_is_reached_without_a_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """A service on this machine is not looked for behind a proxy, by TLS neither."""
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    certificate = own_certificate(tmp_path / "certificate.pem")

    with fake_s3(certificate) as service:
        open_s3(service.settings(tmp_path, endpoint=f"https://127.0.0.1:{service.port}", ca_file=certificate)).close()


def test_roles_and_proxies_of_tls_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: FakeS3) -> None:
    """What a role is found by is left, and the proxy that passes TLS on to a service elsewhere is asked."""
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{fake.port}")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/blocks")
    settings = fake.settings(tmp_path, endpoint="https://s3.invalid")
    monkeypatch.setattr(opening, "_TIMEOUT_S", LIMIT_S)

    with pytest.raises(StorageUnusable) as error:
        open_s3(settings)

    assert not isinstance(error.value, StorageMisconfigured)
    assert [target for method, target in fake.requests if method == "CONNECT"]
    assert os.environ["AWS_ROLE_ARN"] == "arn:aws:iam::1:role/blocks"
