"""The pages that the daemon serves over HTTP. They ask the service as a command does, so that both tell the same."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from typing import Final, Generic, NamedTuple, TypeVar

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Sample

from kvcached.monitoring.assets import load_assets
from kvcached.monitoring.families import Snapshot, families
from kvcached.monitoring.status import status_json
from kvcached.monitoring.tree import tree_json
from kvcached.server.http import Page
from kvcached.service.pending import Answer
from kvcached.service.service import Service
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import engine as wire

#: Who asks, to the service: no connection has this routing id.
_PEER: Final = b"http"
#: A page of metrics is not made anew in this time, so that the cost is bounded however many ask.
METRICS_S_MIN: Final = 0.25
#: The same of `/status.json`, which a status page asks for once a second.
STATUS_S_MIN: Final = 0.25
#: The same of `/tree.json`, which looks at thousands of runs.
TREE_S_MIN: Final = 2.0
#: The same of a health check, which takes slots and work of workers.
HEALTH_S_MIN: Final = 1.0
#: Samples that are written in one turn, some tenths of a millisecond. Requests of engines go between two turns.
SAMPLES_PER_TURN: Final = 50
#: What a scraper names that takes OpenMetrics.
_OPEN_METRICS: Final = "application/openmetrics-text"
#: Each of their formats in the version that every scraper knows.
_FORMATS: Final = {name: choose_encoder(name) for name in ("text/plain", _OPEN_METRICS)}
_EOF: Final = b"# EOF\n"
#: Lines of both formats end with a line feed alone: a label's value may contain any other character that ends lines.
_COMMENT: Final = re.compile(rb"^#.*\n", re.MULTILINE)

R = TypeVar("R", bound=wire.Header)
T = TypeVar("T")


class Shared(Generic[T]):
    """A result that is computed once for all who ask while it is computed, and for some time after that.

    Args:
        compute: makes it.
        keep_s: for how long it is kept.
    """

    def __init__(self, compute: Callable[[], Awaitable[T]], keep_s: float) -> None:
        self._compute = compute
        self._keep_s = keep_s
        self._task: asyncio.Task[T] | None = None
        self._done_s = 0.0

    async def get(self) -> T:
        """The result. Who is cancelled while it waits takes the result from nobody."""
        loop = asyncio.get_running_loop()
        if self._task is None or (self._task.done() and loop.time() - self._done_s >= self._keep_s):
            self._task = loop.create_task(self._timed(loop))
        return await asyncio.shield(self._task)

    async def _timed(self, loop: asyncio.AbstractEventLoop) -> T:
        try:
            return await self._compute()
        finally:
            self._done_s = loop.time()


class HostSize(NamedTuple):
    """Of the host pool; zeros without one."""

    slabs: int = 0
    slab_bytes: int = 0


class DaemonPages:
    """Liveness, readiness, metrics, figures and the status page of one daemon.

    Args:
        service: of the daemon.
        host: the host pool.
        attach_refusals: refused requests at the attach socket, by code.
    """

    def __init__(self, service: Service, host: HostSize, attach_refusals: Mapping[ErrorCode, int]) -> None:
        self._service = service
        self._host = host
        self._attach_refusals = attach_refusals
        self._health = Shared(self._check, HEALTH_S_MIN)
        self._texts = {name: Shared(partial(self._render, name), METRICS_S_MIN) for name in _FORMATS}
        self._figures = Shared(self._make_status, STATUS_S_MIN)
        self._tree = Shared(partial(tree_json, service.reports), TREE_S_MIN)
        self._assets = load_assets()
        self._pages: dict[str, Callable[[str], Awaitable[Page]]] = {
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
            "/status.json": partial(_json, self._figures),
            "/tree.json": partial(_json, self._tree),
        }

    async def get(self, path: str, accept: str) -> Page:
        """The page at a path."""
        if path in self._assets:
            return self._assets[path]
        page = self._pages.get(path)
        if page is None:
            known = ", ".join(("/", *self._pages))
            return Page(HTTPStatus.NOT_FOUND, f"there is nothing here, only {known}\n".encode())
        return await page(accept)

    async def _livez(self, _: str) -> Page:
        return Page(HTTPStatus.OK, b"ok\n")

    async def _readyz(self, _: str) -> Page:
        report = await self._health.get()
        if isinstance(report, wire.HealthReport):
            lines = [f"{'ok' if each.ok else 'FAILED'} {each.part} {each.detail}".rstrip() for each in report.parts]
        else:
            lines = [f"FAILED {report.message}; {report.fix}"]
        is_ok = isinstance(report, wire.HealthReport) and report.ok
        status = HTTPStatus.OK if is_ok else HTTPStatus.SERVICE_UNAVAILABLE
        return Page(status, "".join(f"{line}\n" for line in lines).encode())

    async def _metrics(self, accept: str) -> Page:
        name = _OPEN_METRICS if _OPEN_METRICS in accept else "text/plain"
        _, content_type = _FORMATS[name]
        return Page(HTTPStatus.OK, await self._texts[name].get(), content_type)

    async def _make_status(self) -> bytes:
        return status_json(self._snapshot(), *self._service.reports.sessions())

    async def _check(self) -> wire.HealthReport | wire.ErrorReply:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._service.submit(_PEER, wire.Health(id=0), [], answer.set_result)
        header = (await answer).header
        if not isinstance(header, wire.HealthReport | wire.ErrorReply):
            raise TypeError(f"the answer to health is {type(header).__name__}")
        return header

    async def _render(self, name: str) -> bytes:
        encode, _ = _FORMATS[name]
        pieces: list[bytes] = []
        for family in families(self._snapshot()):
            for number, part in enumerate(_parts(family)):
                text = encode(part).removesuffix(_EOF)
                pieces.append(_without_comments(text) if number else text)
                await asyncio.sleep(0)
        return b"".join(pieces) + (_EOF if name == _OPEN_METRICS else b"")

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            stats=self._ask(wire.StatsReport, wire.Stats(id=0)),
            description=self._ask(wire.Description, wire.Describe(id=0)),
            storage=self._ask(wire.StorageReport, wire.StorageControl(id=0, action="status")),
            lasting_namespaces=self._service.reports.lasting_namespaces(),
            host_slabs=self._host.slabs,
            slab_bytes=self._host.slab_bytes,
            request_times=self._service.request_times,
            copy_times=self._service.copy_times,
            waiting=self._service.waiting(),
            attach_refusals=self._attach_refusals,
            is_ledger_missing=bool(self._service.state_writer.trouble),
        )

    def _ask(self, kind: type[R], request: wire.Request) -> R:
        """The answer to a request that is answered at once."""
        answers: list[Answer] = []
        self._service.submit(_PEER, request, [], answers.append)
        (answer,) = answers
        if not isinstance(answer.header, kind):
            raise TypeError(f"the answer to {type(request).__name__} is {answer.header}")
        return answer.header


async def _json(shared: Shared[bytes], _: str) -> Page:
    return Page(HTTPStatus.OK, await shared.get(), "application/json", (("cache-control", "no-store"),))


class _Part:
    """Some samples of a family, as an encoder takes them."""

    def __init__(self, family: Metric, samples: list[Sample]) -> None:
        self._metric = Metric(family.name, family.documentation, family.type)
        self._metric.samples = samples

    def collect(self) -> Iterator[Metric]:
        """The only family."""
        yield self._metric


def _parts(family: Metric) -> Iterator[_Part]:
    for start in range(0, max(len(family.samples), 1), SAMPLES_PER_TURN):
        yield _Part(family, family.samples[start : start + SAMPLES_PER_TURN])


def _without_comments(text: bytes) -> bytes:
    """The samples alone: the family's name, type and meaning were written with its first samples."""
    return _COMMENT.sub(b"", text)
