"""An S3 service in this process that does what a test plans: it refuses, forgets conditions, or loses answers.

It keeps objects of one bucket in memory, compares before it writes as services do, and takes any signature.
"""

from __future__ import annotations

import hashlib
import re
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.storage.s3.servers import write_keys

BUCKET = "blocks"


class FakeS3:
    """The service.

    Attributes:
        objects: what is stored, by name.
        conditions: which it compares before it writes.
        plan: what to do with the next requests that `is_planned` says: an answer (status, code), or "lost": do it, and
            answer with a failure, or "late": do it when a test says so, or "hung": no answer before the end.
        is_planned: for which requests, by method and name.
        refused_deletes: the code that it refuses to delete each object with, in an answer of status 200.
        modified: when objects were written, as the lists say; another time for some names.
        requests: methods and names of all requests so far.
        signatures: of these.
        resumed: set when it does what it is late with.
        ended: set at the end.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.conditions = {"if-match", "if-none-match"}
        self.plan: deque[tuple[int, str] | str] = deque()
        self.is_planned: Callable[[str, str], bool] = lambda method, name: "probe/" not in name
        self.refused_deletes = ""
        self.modified: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []
        self.signatures: list[str] = []
        self.lock = threading.Lock()
        self.port = 0
        self.resumed, self.ended = threading.Event(), threading.Event()

    def settings(self, folder: Path, **more: object) -> dict[str, object]:
        """Settings of a backend that uses it."""
        keys = write_keys(folder / "keys", "somebody", "somebodys-secret")
        return {"bucket": BUCKET, "endpoint": f"http://127.0.0.1:{self.port}", "credentials_file": keys, **more}


@contextmanager
def fake_s3(certificate: Path | None = None) -> Iterator[FakeS3]:
    """A running service; with a file of a key and its certificate, one that is reached by TLS."""
    fake = FakeS3()

    class Handler(_Handler):
        service = fake

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        fake.port = server.server_address[1]
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield fake
        finally:
            fake.ended.set()
            fake.resumed.set()
            server.shutdown()
            thread.join()


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    service: FakeS3
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class names it
        """Say nothing."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        target = urlsplit(self.path)
        name, query = unquote(target.path).removeprefix(f"/{BUCKET}").lstrip("/"), parse_qs(target.query)
        service = self.service
        with service.lock:
            service.requests.append((self.command, name))
            service.signatures.append(self.headers.get("authorization") or "")
            planned = service.plan.popleft() if service.plan and service.is_planned(self.command, name) else None
        if planned == "hung":
            service.ended.wait()
            self.close_connection = True
            return
        if planned == "late":
            service.resumed.wait()
            planned = None
        with service.lock:
            if isinstance(planned, tuple):
                self._refuse(*planned)
                return
            answer = self._do(name, query, body)
            self._answer(*(answer if planned is None else (500, b"<Error><Code>InternalError</Code></Error>", "")))

    do_GET = do_HEAD = do_PUT = do_POST = do_CONNECT = _serve  # noqa: N815 - the base class looks for these names

    def _do(self, name: str, query: dict[str, list[str]], body: bytes) -> tuple[int, bytes, str]:
        """Status, body and ETag."""
        objects = self.service.objects
        if "list-type" in query:
            return 200, _listed(objects, query, self.service.modified), ""
        if self.command == "POST":
            return 200, _deleted(objects, body.decode(), self.service.refused_deletes), ""
        there = objects.get(name)
        if self.command == "PUT":
            if not self._holds(there):
                return 412, b"<Error><Code>PreconditionFailed</Code></Error>", ""
            objects[name] = body
            return 200, b"", _tag(body)
        if there is None:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", ""
        return 200, there, _tag(there)

    def _holds(self, there: bytes | None) -> bool:
        conditions = {name: self.headers[name] for name in self.service.conditions if name in self.headers}
        if "if-match" in conditions:
            return there is not None and conditions["if-match"] == _tag(there)
        return there is None or not conditions

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>somebodys-secret</Message></Error>".encode(), "")

    def _answer(self, status: int, body: bytes, tag: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Sat, 28 Nov 2026 12:00:00 GMT")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _deleted(objects: dict[str, bytes], body: str, refusal: str) -> bytes:
    """Delete objects; or refuse to, for each of them."""
    names = re.findall(r"<Key>([^<]*)</Key>", body)
    if refusal:
        said = f"<Code>{refusal}</Code><Message>somebodys-secret</Message>"
        rows = "".join(f"<Error><Key>{each}</Key>{said}</Error>" for each in names)
    else:
        for each in names:
            objects.pop(each, None)
        rows = "".join(f"<Deleted><Key>{each}</Key></Deleted>" for each in names)
    return f"<DeleteResult>{rows}</DeleteResult>".encode()


def _listed(objects: dict[str, bytes], query: dict[str, list[str]], modified: dict[str, str]) -> bytes:
    """One page of at most a thousand; the next one begins behind its last name."""
    after = query.get("continuation-token", [""])[0]
    names = sorted(each for each in objects if each.startswith(query.get("prefix", [""])[0]) and each > after)
    page = names[:1000]
    rows = "".join(
        f"<Contents><Key>{escape(each)}</Key>"
        f"<LastModified>{modified.get(each, '2026-11-28T12:00:00.000Z')}</LastModified>"
        f"<ETag>{escape(_tag(objects[each]))}</ETag><Size>{len(objects[each])}</Size></Contents>"
        for each in page
    )
    more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(names) > len(page) else ""
    return f"<ListBucketResult>{more}{rows}</ListBucketResult>".encode()
