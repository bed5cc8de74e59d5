"""Which settings, keys and services the backend `s3` opens with, and what it says of the others."""

from __future__ import annotations

import ipaddress
import re
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from importlib.metadata import EntryPoint
from pathlib import Path

import obstore
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvcached.storage.backend import DONE, StorageMisconfigured, StorageUnusable
from kvcached.storage.s3 import credentials, opening
from kvcached.storage.s3.credentials import FileCredentials
from kvcached.storage.s3.opening import open_s3
from kvcached.storage.s3.settings import S3Settings
from kvcached.storage.settings import checked
from tests.project.source_tree import ROOT
from tests.storage.s3.servers import server, write_keys
from tests.storage.s3.service import FakeS3, fake_s3
from tests.storage.values import TIMEOUT_S, key, stored


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have keys."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    with fake_s3() as service:
        yield service


def refusal(settings: dict[str, object], kind: type[StorageUnusable] = StorageMisconfigured) -> str:
    """What is said when it is not opened."""
    with pytest.raises(StorageUnusable) as error:
        open_s3(settings)
    assert type(error.value) is kind, error.value
    return str(error.value)


def test_distribution_names_the_backend() -> None:
    """The entry point `s3` is the function that opens it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    value = project["entry-points"]["kvcached.storage"]["s3"]

    assert EntryPoint("s3", value, "kvcached.storage").load() is open_s3


def test_hint_names_what_the_extra_brings() -> None:
    """The package that the message of a missing extra names is that of the extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert [each.partition(">")[0] for each in project["optional-dependencies"]["s3"]] == [opening.PACKAGES]


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: FakeS3) -> None:
    """Without the package the backend is refused for good, with the command that installs it."""
    settings = fake.settings(tmp_path)
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "kvcached.storage.s3.backend", raising=False)
    monkeypatch.delitem(sys.modules, "kvcached.storage.s3.record", raising=False)

    assert refusal(settings) == "s3 storage needs the package obstore: pip install obstore"


def test_all_mistakes_are_named() -> None:
    """One message names every wrong setting, with what to do where that is not plain."""
    with pytest.raises(StorageMisconfigured) as error:
        checked(
            S3Settings,
            {
                "bucket": "No",
                "prefix": "/blocks",
                "endpoint": "http://10.0.0.1:9000",
                "credentials_file": "keys",
                "threads": 0,
                "secret": "aha",
            },
            "s3",
        )

    said = str(error.value)
    assert [said.count(f"{name}: ") for name in ("bucket", "prefix", "endpoint", "credentials_file", "threads")] == [
        1
    ] * 5
    assert "secret: Extra inputs are not permitted" in said
    assert "set allow_http = true" in said
    assert "aha" not in said


@pytest.mark.parametrize(
    "endpoint",
    [
        "s3.example.com",
        "ftp://s3.example.com",
        "https://",
        "https://s3.example.com/blocks",
        "https://s3.example.com?x=1",
        "https://key:secret@s3.example.com",
        "https://s3.example.com:99999",
        "https://s3.example.com:0",
        "https://[::1",
        "https://s3.exa mple.com",
    ],
)
def test_endpoint_is_scheme_host_and_port(endpoint: str) -> None:
    """An endpoint with anything else is a mistake."""
    with pytest.raises(StorageMisconfigured, match="endpoint: is no endpoint"):
        checked(S3Settings, {"bucket": "blocks", "endpoint": endpoint}, "s3")


@pytest.mark.parametrize("prefix", ["", "kvcached", "a//b/", "../a/", "a/./", "ä/", "a b/", "x" * 512 + "/"])
def test_prefix_is_the_same_to_every_service(prefix: str) -> None:
    """A prefix ends with a slash, and has no part that a service or a library would write in another way."""
    with pytest.raises(StorageMisconfigured, match="prefix: is no prefix"):
        checked(S3Settings, {"bucket": "blocks", "prefix": prefix}, "s3")


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9000", "http://[::1]:9000", "http://localhost", "https://x.y/"])
def test_what_stays_on_this_machine_need_not_be_encrypted(endpoint: str) -> None:
    """http:// is allowed for loopback addresses, and a final slash means nothing."""
    assert S3Settings(bucket="blocks", endpoint=endpoint).endpoint == endpoint.rstrip("/")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"profile": "default"}, "profile: is a section of no file (name a credentials_file, or leave it out)"),
        ({"allow_http": True}, "endpoint: is missing, and allow_http is of an endpoint alone (add it, or leave out"),
    ],
)
def test_setting_without_effect_is_a_mistake(more: dict[str, object], told: str) -> None:
    """What is of another setting, which is not there, is refused: somebody has forgotten that one."""
    with pytest.raises(StorageMisconfigured) as error:
        checked(S3Settings, {"bucket": "blocks", **more}, "s3")

    assert told in str(error.value)


def test_bucket_stands_in_path_or_host() -> None:
    """At an endpoint the bucket is in the path, unless the settings say otherwise; at AWS it is in the host."""
    there = S3Settings(bucket="blocks", endpoint="https://s3.example.com:8443")
    named = S3Settings(bucket="blocks", endpoint="https://s3.example.com:8443", path_style=False)

    assert (there.has_bucket_in_path, there.bucket_endpoint) == (True, "https://s3.example.com:8443")
    assert (named.has_bucket_in_path, named.bucket_endpoint) == (False, "https://blocks.s3.example.com:8443")
    assert S3Settings(bucket="blocks").bucket_endpoint == "https://blocks.s3.us-east-1.amazonaws.com"
    assert S3Settings(bucket="my.blocks", region="eu-west-1").bucket_endpoint == "https://s3.eu-west-1.amazonaws.com"


def test_environment_leads_blocks_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: FakeS3) -> None:
    """Another endpoint in the environment, and a wish not to sign requests, change nothing."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")

    open_s3(fake.settings(tmp_path)).close()

    assert fake.requests
    assert all("Credential=somebody/" in each for each in fake.signatures)


def test_keys_of_the_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in the environment are not used in place of a role; the message has no value of them."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")

    said = refusal({"bucket": "blocks"})

    assert "AWS_SECRET_ACCESS_KEY" in said
    assert "the-secret" not in said


def test_credentials_file_is_private(tmp_path: Path) -> None:
    """A file that others may read is refused, and the command that mends it is named."""
    keys = write_keys(tmp_path / "keys", "somebody", "the-secret", mode=0o640)

    said = refusal({"bucket": "blocks", "credentials_file": keys}, StorageUnusable)

    assert f"chmod 600 {keys}" in said


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[default]\naws_access_key_id = x\n", "no aws_secret_access_key in [default]"),
        ("[other]\naws_access_key_id = x\naws_secret_access_key = the-secret\n", "no aws_access_key_id and no"),
        ("the-secret\n", "is no credentials file"),
        ("[default]\nthe-secret\n", "is no credentials file"),
        ("\udcff", "is no credentials file"),
    ],
)
def test_credentials_file_has_keys(tmp_path: Path, content: str, expected: str) -> None:
    """A file without keys of the profile is refused, and nothing in it is told."""
    keys = write_keys(tmp_path / "keys", "", "")
    keys.write_text(content, errors="surrogateescape")

    said = refusal({"bucket": "blocks", "credentials_file": keys}, StorageUnusable)

    assert expected in said
    assert "the-secret" not in said


def test_missing_credentials_file_is_named(tmp_path: Path) -> None:
    """A file that is not there may come, as a mounted secret does."""
    assert "No such file" in refusal({"bucket": "blocks", "credentials_file": tmp_path / "keys"}, StorageUnusable)
    assert "not a regular file" in refusal({"bucket": "blocks", "credentials_file": tmp_path}, StorageUnusable)


def test_replaced_keys_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever replaces the file need not restart; keys that cannot be read at the moment are those from before."""
    path = write_keys(tmp_path / "keys", "first", "secret")
    keys = FileCredentials(path, "default")
    write_keys(path, "second", "secret")

    assert keys()["access_key_id"] == "second"

    path.unlink()

    assert [keys()["access_key_id"] for _ in range(2)] == ["second"] * 2
    assert caplog.text.count("the keys from before are used") == 1


def test_session_goes_on_with_its_next_keys(tmp_path: Path, fake: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are signed with the keys in the file as soon as it is read again, which is a matter of seconds."""
    kept = credentials.KEEP
    assert kept <= timedelta(seconds=10)
    monkeypatch.setattr(credentials, "KEEP", timedelta(seconds=0.2))
    settings = fake.settings(tmp_path)
    with closing(open_s3(settings)) as storage:
        write_keys(tmp_path / "keys", "next", "secret")
        until_s = time.monotonic() + TIMEOUT_S
        while "Credential=next/" not in fake.signatures[-1]:
            assert time.monotonic() < until_s
            storage.exists([key(1)], timeout_s=TIMEOUT_S)


def test_authorities_are_read(tmp_path: Path, fake: FakeS3) -> None:
    """A file of authorities that is not there, or has none, is named."""
    settings = fake.settings(tmp_path, ca_file=tmp_path / "ca.pem")

    assert "ca.pem: No such file" in refusal(settings, StorageUnusable)
    (tmp_path / "ca.pem").write_text("nothing")
    assert "No certificates found" in refusal(settings, StorageUnusable)


def test_certificate_is_checked(tmp_path: Path) -> None:
    """A service with a certificate of one's own authority is used with that authority, and not without."""
    certificate = own_certificate(tmp_path / "certificate.pem")
    with fake_s3(certificate) as service:
        endpoint = f"https://127.0.0.1:{service.port}"
        storage = open_s3(service.settings(tmp_path, endpoint=endpoint, ca_file=certificate))
        assert storage.put([stored(1)], timeout_s=TIMEOUT_S) == [DONE]
        storage.close()

        assert "no connection" in refusal(service.settings(tmp_path, endpoint=endpoint), StorageUnusable)


def own_certificate(path: Path) -> Path:
    """A new key for 127.0.0.1, and a certificate that it signs itself, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvcached tests")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = serialization.Encoding.PEM
    private = key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + certificate.public_bytes(form))
    return path


@pytest.mark.parametrize("missing", ["if-match", "if-none-match"])
def test_service_without_conditions_is_refused(tmp_path: Path, fake: FakeS3, missing: str) -> None:
    """A service that writes whatever one of the conditions is would lose clears, so it is never used."""
    fake.conditions.remove(missing)

    assert "does not compare before it writes" in refusal(fake.settings(tmp_path))
    assert fake.objects == {}


def test_service_that_refuses_all_conditions_is_refused(tmp_path: Path, fake: FakeS3) -> None:
    """A service that never finds the version that it has told would keep the first record for ever."""
    fake.plan.extend([(412, "PreconditionFailed")] * 9)
    fake.is_planned = lambda method, name: method == "PUT" and name in fake.objects

    assert "does not compare before it writes" in refusal(fake.settings(tmp_path))


def test_service_that_does_not_know_conditions_is_refused(tmp_path: Path, fake: FakeS3) -> None:
    """A service that answers 501 to a condition is refused with the same advice."""
    fake.plan.extend([(501, "NotImplemented")] * 3)
    fake.is_planned = lambda method, name: method == "PUT"

    assert "must refuse a PUT" in refusal(fake.settings(tmp_path))


def test_opening_leaves_nothing_behind(tmp_path: Path, fake: FakeS3) -> None:
    """The object that an opening writes to try the service is deleted."""
    open_s3(fake.settings(tmp_path)).close()

    assert "PUT" in {method for method, name in fake.requests if "/probe/" in name}
    assert fake.objects == {}


def test_other_region_is_told(tmp_path: Path, fake: FakeS3) -> None:
    """Where the bucket is in another region, the setting is named."""
    fake.plan.append((400, "AuthorizationHeaderMalformed"))

    assert "set the region" in refusal(fake.settings(tmp_path))


def test_expired_keys_are_tried_again(tmp_path: Path, fake: FakeS3) -> None:
    """Keys of a session that expired are replaced some time, so this is no mistake of the settings."""
    fake.plan.append((403, "ExpiredToken"))

    assert "ExpiredToken" in refusal(fake.settings(tmp_path), StorageUnusable)


def test_service_that_is_away_is_tried_again(tmp_path: Path, fake: FakeS3) -> None:
    """A refused connection is no mistake of the settings."""
    settings = fake.settings(tmp_path, endpoint="http://127.0.0.1:1")

    assert "no connection: Connection refused" in refusal(settings, StorageUnusable)


def test_missing_bucket_is_named(tmp_path: Path) -> None:
    """A bucket that SeaweedFS does not have is to be created."""
    said = refusal(server().settings(tmp_path, bucket="no-such-bucket"))

    assert "NoSuchBucket" in said
    assert "create it" in said


@pytest.mark.parametrize(("key", "secret"), [("kvcachedowner", "wrong"), ("nobody", "owners-secret")])
def test_wrong_keys_are_told(tmp_path: Path, key: str, secret: str) -> None:
    """Keys that SeaweedFS does not know are a mistake in the file that has them, and are not told."""
    keys = write_keys(tmp_path / "keys", key, secret)

    said = refusal(server().settings(tmp_path, credentials_file=keys))

    assert f"correct the keys in {keys}" in said
    assert not re.search(r"nobody|kvcachedowner|secret", said.replace(str(keys), ""))


def test_who_may_only_read_is_refused(tmp_path: Path) -> None:
    """Keys that SeaweedFS lets read only cannot keep the record, and leave nothing there."""
    started = server()

    said = refusal(started.settings(tmp_path, credentials_file=started.directory / "reader"))

    assert "to delete objects (s3:DeleteObject) of" in said
    assert list(obstore.list(started.store(), tmp_path.name)) == []
