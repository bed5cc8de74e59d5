from __future__ import annotations

import logging
import re
import socket
import ssl
import time
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
from redis.exceptions import RedisError

from kvcached.storage.backend import DONE, Outcome, StorageMisconfigured, StorageUnusable
from kvcached.storage.redis import opening
from kvcached.storage.redis.backend import RedisStorage
from kvcached.storage.redis.opening import open_redis
from tests.storage.disks import get, put
from tests.storage.redis.servers import Certificates, Server, door, opened, private, running, speaking
from tests.storage.redis.users import PASSWORD, documented_user, whole_use
from tests.storage.values import TIMEOUT_S, key, stored


def refusal(**settings: object) -> StorageUnusable:
    """Why a backend cannot be opened."""
    with pytest.raises(StorageUnusable) as caught:
        open_redis(settings)
    assert PASSWORD not in str(caught.value)
    return caught.value


def is_for_good(error: StorageUnusable) -> bool:
    """Whether it is not tried again."""
    return isinstance(error, StorageMisconfigured)


def test_password_is_read_from_its_file(tmp_path: Path) -> None:
    """The server's password opens it, and a wrong one or none is refused for good, in words without it."""
    right, wrong = private(tmp_path / "right", f"{PASSWORD}\n"), private(tmp_path / "wrong", "something")
    with running("--requirepass", PASSWORD) as server:
        with opened(server, password_file=right) as storage:
            assert put(storage, 1) == [Outcome.DONE]

        for settings in ({"password_file": wrong}, {"password_file": right, "username": "nobody"}, {}):
            error = refusal(**server.settings("test"), **settings)
            assert is_for_good(error)
            assert "set username and password_file" in str(error)


def test_password_file_is_looked_into(tmp_path: Path, server: Server) -> None:
    """A password that others may read, that is empty or no text, is refused until the file is mended."""
    path = private(tmp_path / "password", "")
    settings = server.settings("test", password_file=path)

    assert "is empty" in str(refusal(**settings))
    path.write_bytes(b"\xff\xfe")
    assert "no text in UTF-8" in str(refusal(**settings))
    path.chmod(0o644)
    error = refusal(**settings)
    assert "chmod 600" in str(error)
    assert not is_for_good(error)


def test_password_may_be_replaced(tmp_path: Path) -> None:
    """Connections that are made later use the password that the file has then."""
    path = private(tmp_path / "password", PASSWORD)
    with running("--requirepass", PASSWORD) as server, opened(server, password_file=path) as storage:
        server.kill()
        path.write_text("another one")
        server._options = ("--requirepass", "another one")
        server.start()

        assert put(storage, 1) == [Outcome.DONE]


def test_user_of_the_documentation_can_do_everything(tmp_path: Path) -> None:
    """The ACL in docs/storage.md lets the backend do all it does, and reach no other key."""
    with running() as server:
        server.ask(*documented_user())
        with opened(server, "kvcached", username="kvcached", password_file=_password(tmp_path)) as storage:
            assert whole_use(storage)
        assert server.ask("KEYS", "*probe*") == []
        error = refusal(**server.settings("other", username="kvcached", password_file=_password(tmp_path)))
        assert is_for_good(error)
        assert "refuses SET" in str(error)
        with opened(server, "kvcached", username="kvcached", password_file=_password(tmp_path)) as storage:
            server.ask(*documented_user(), "-set")
            (result,) = storage.put([stored(1)], timeout_s=TIMEOUT_S)
            assert result.outcome is Outcome.FAILED
            assert "docs/storage.md" in result.detail


def test_user_of_the_documentation_needs_every_permission(tmp_path: Path) -> None:
    """Without any one of its permissions it is refused for good, by name, and something would fail later."""
    command = documented_user()
    file = _password(tmp_path)
    with running() as server:
        for permission in [each for each in command if each.startswith("+")]:
            server.ask(*[each for each in command if each != permission])
            error = refusal(**server.settings("kvcached", username="kvcached", password_file=file))
            assert is_for_good(error), permission
            assert f"'{permission[1:]}'" in str(error)
            assert "docs/storage.md" in str(error)
            if permission == "+info":  # which every opening needs
                continue

            server.ask(*command)
            server.ask("DEL", "kvcached:record")
            with opened(server, "kvcached", username="kvcached", password_file=file) as storage:
                server.ask(*command, f"-{permission[1:]}")
                try:
                    assert not whole_use(storage), permission
                except RedisError as error:
                    assert re.search(r"permissions|NOPERM", str(error))


def test_full_server_is_opened() -> None:
    """A server that has no memory left, and does not evict, is opened: what it has can be read."""
    with running("--maxmemory", "1", "--maxmemory-policy", "noeviction") as server, opened(server) as storage:
        assert put(storage, 1) == [Outcome.FULL]
        assert storage.write_record(b"record", b"", timeout_s=TIMEOUT_S)


def test_probe_leaves_nothing(server: Server) -> None:
    """Opening writes no key that stays, and spoils none of a record."""
    with opened(server, "probed") as storage:
        version = storage.write_record(b"record", b"", timeout_s=TIMEOUT_S)
        with opened(server, "probed"):
            assert server.ask("KEYS", "probed:*") == [b"probed:record"]
        assert storage.read_record(timeout_s=TIMEOUT_S) == (b"record", version)


def _password(tmp_path: Path) -> Path:
    return private(tmp_path / "password", PASSWORD)


def test_absent_server_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing listens, or the name is unknown, opening may succeed later; the message names the server."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    refused = refusal(url=f"redis://127.0.0.1:{port}")
    nowhere = refusal(url=f"unix://{tmp_path}/none")
    monkeypatch.setattr(socket, "getaddrinfo", _knows_nobody)
    unknown = refusal(url="redis://name.invalid")

    assert not any(map(is_for_good, (refused, nowhere, unknown)))
    assert f"127.0.0.1:{port}" in str(refused)
    assert "start the server, or name another one in url" in str(nowhere)


def _knows_nobody(*_: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_hung_server_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer cannot be opened, after the time that opening may take."""
    monkeypatch.setattr(opening, "_TIMEOUT_S", 0.2)
    with running() as server, server.stopped():
        began_s = time.monotonic()
        error = refusal(**server.settings("test"))

        assert time.monotonic() - began_s < 2
        assert not is_for_good(error)


def test_replica_is_tried_again() -> None:
    """A replica may become a primary."""
    with running() as server:
        server.ask("REPLICAOF", "127.0.0.1", "1")
        error = refusal(**server.settings("test"))

    assert not is_for_good(error)
    assert "name the primary" in str(error)


def test_loading_server_is_tried_again() -> None:
    """A server that reads its data from disk refuses all work until it is done."""
    with speaking(b"-LOADING Valkey is loading the dataset in memory\r\n") as port:
        error = refusal(url=f"redis://127.0.0.1:{port}")

    assert not is_for_good(error)
    assert "loading" in str(error)


def test_socket_of_a_node_of_a_cluster_is_refused() -> None:
    """The nodes of a cluster name each other by hosts and ports."""
    with running("--cluster-enabled", "yes") as server:
        error = refusal(**server.settings("test"))

    assert is_for_good(error)
    assert "cluster" in str(error)


def test_old_server_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without scripts that write when memory is used up is refused for good."""
    monkeypatch.setattr(opening, "_VERSION_MIN", 99)

    assert is_for_good(refusal(**server.settings("test")))


def test_database_that_is_not_there_is_refused(server: Server) -> None:
    """A number beyond the server's databases is a wrong setting; another one keeps its keys apart."""
    with door(server) as port:
        error = refusal(url=f"redis://127.0.0.1:{port}/99", prefix="test")
        with closing(open_redis({"url": f"redis://127.0.0.1:{port}/2", "prefix": "test"})) as storage:
            assert put(storage, 1) == [Outcome.DONE]

    assert is_for_good(error)
    with opened(server, "test") as storage:
        assert storage.exists([key(1)], timeout_s=TIMEOUT_S) == [False]


def test_policy_that_evicts_the_record_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Random eviction does not spare the record, and the log says so once; the recommended policy is no matter."""
    caplog.set_level(logging.INFO)
    for policy, lines in (("allkeys-lru", 0), ("allkeys-random", 1)):
        with running("--maxmemory", "8mb", "--maxmemory-policy", policy) as server, opened(server):
            assert len(caplog.records) == lines


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Of an authority, a server and a daemon."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


def tls(certificates: Certificates) -> ssl.SSLContext:
    """What a server with TLS shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server, certificates.server_key)
    return context


def test_blocks_cross_tls(server: Server, certificates: Certificates) -> None:
    """Behind TLS, with the authority that signed the server's certificate, blocks come back as they were."""
    with door(server, tls(certificates)) as port:
        settings = {"url": f"rediss://127.0.0.1:{port}", "prefix": "tls", "ca_file": certificates.authority}
        with closing(open_redis(settings)) as storage:
            assert put(storage, 1, 2) == [Outcome.DONE] * 2
            (connection,) = cast("RedisStorage", storage)._nodes.first._idle
            assert get(storage, 2) == DONE
            assert cast("RedisStorage", storage)._nodes.first._idle == [connection]


def test_server_proves_who_it_is(server: Server, certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that nobody known has signed, or of another name, is refused, and so is a server without TLS."""
    with door(server, tls(certificates)) as port:
        unknown = refusal(url=f"rediss://127.0.0.1:{port}")
        other = refusal(url=f"rediss://localhost:{port}", ca_file=certificates.authority)
    monkeypatch.setattr(opening, "_TIMEOUT_S", 0.3)  # it waits for the rest of a line
    with door(server) as port:
        plain = refusal(url=f"rediss://127.0.0.1:{port}", ca_file=certificates.authority)

    assert "certificate verify failed" in str(unknown)
    assert "certificate is not valid for 'localhost'" in str(other)
    assert not any(map(is_for_good, (unknown, other, plain)))


def test_daemon_proves_who_it_is(server: Server, certificates: Certificates) -> None:
    """A server that asks for a certificate gets the daemon's; one without is refused."""
    context = tls(certificates)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(certificates.authority)
    with door(server, context) as port:
        settings = {"url": f"rediss://127.0.0.1:{port}", "prefix": "mutual", "ca_file": certificates.authority}
        refusal(**settings)
        settings |= {"certificate_file": certificates.daemon, "key_file": certificates.daemon_key}
        with closing(open_redis(settings)) as storage:
            assert put(storage, 1) == [Outcome.DONE]


def test_file_of_tls_at_fault_is_named(tmp_path: Path, certificates: Certificates) -> None:
    """A missing file, one that is no certificate, a key of another one, one that others can read: each by its name."""
    url, good = "rediss://127.0.0.1:1", {"certificate_file": certificates.daemon}
    text = private(tmp_path / "text", "no certificate")
    shared = private(tmp_path / "shared", certificates.daemon_key.read_text())
    shared.chmod(0o644)

    assert f"ca_file: {tmp_path}/none: No such file" in str(refusal(url=url, ca_file=tmp_path / "none"))
    assert f"ca_file: {text}" in str(refusal(url=url, ca_file=text))
    assert f"certificate_file: {text}" in str(refusal(url=url, certificate_file=text))
    assert "certificate_file" in str(refusal(url=url, **good, key_file=certificates.server_key))
    assert f"key_file: {shared}" in str(refusal(url=url, **good, key_file=shared))
