"""What a test puts in the place of `kvcached_client.Admin`, so that commands need no daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self, TypeVar

from kvcached_client.errors import request_error
from kvcached_client.protocol import engine as protocol
from tests.service.office import Office

R = TypeVar("R", bound=protocol.Header)


class ConnectedAdmin:
    """What commands do with every `Admin`: connect to it and close it."""

    def connect(self, _: Path | None, *, deadline_ms: int) -> Self:
        assert deadline_ms
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class FakeAdmin(ConnectedAdmin):
    """An `Admin` that answers every question with `reply`, or raises it.

    Attributes:
        reply: a reply, or an error.
        description: the reply to `describe`, for commands that ask for it beside their report.
        asked: method, arguments and options of each question.
    """

    def __init__(self) -> None:
        self.reply: Any = None
        self.description: protocol.Description | None = None
        self.asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any, **options: Any) -> Any:
            self.asked.append((name, arguments, options))
            if isinstance(self.reply, Exception):
                raise self.reply
            is_report = name != "describe" or isinstance(self.reply, protocol.Description)
            return self.reply if is_report or self.description is None else self.description

        return answer


class OfficeAdmin(ConnectedAdmin):
    """An `Admin` that asks a service in this process."""

    def __init__(self, office: Office) -> None:
        self._office = office

    def describe(self) -> protocol.Description:
        return self._ask(protocol.Description, protocol.Describe(id=self._office.next_id()))

    def explain(self, keys: bytes, tokens: int, **fields: Any) -> tuple[protocol.Explanation, ...]:
        request = protocol.Explain(id=self._office.next_id(), tokens=tokens, **fields)
        return self._ask(protocol.Explained, request, keys).explanations

    def pin(self, target: str, keys: bytes, *, ttl_ms: int) -> protocol.Pinned:
        request = protocol.Pin(id=self._office.next_id(), target=target, ttl_ms=ttl_ms)
        return self._ask(protocol.Pinned, request, keys)

    def unpin(self, target: str, keys: bytes) -> bool:
        request = protocol.Unpin(id=self._office.next_id(), target=target)
        return self._ask(protocol.Unpinned, request, keys).was_pinned

    def forget(self, target: str, keys: bytes, *, from_block: int, deadline_ms: int) -> protocol.PrefixForgotten:
        request = protocol.ForgetPrefix(
            id=self._office.next_id(), target=target, from_block=from_block, deadline_ms=deadline_ms
        )
        return self._ask(protocol.PrefixForgotten, request, keys)

    def _ask(self, kind: type[R], request: protocol.Request, *frames: bytes) -> R:
        header = self._office.ask(request, *frames, peer=b"cli").header
        if isinstance(header, protocol.ErrorReply):
            raise request_error(header.code, header.message, header.fix)
        assert isinstance(header, kind)
        return header
