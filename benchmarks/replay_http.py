"""Completions streamed over HTTP on a Unix socket, with the standard library alone: when did the first token come?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MODEL_NAME: Final = "local"
#: Of one wait for bytes.
_TIMEOUT_S: Final = 300.0
_EVENT: Final = b"data: "
_LAST_EVENT: Final = b"[DONE]"
_LINE_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request.

    Attributes:
        sent_s: by the loop's clock.
        first_token_s: from sending to the event with the first token.
        last_token_s: from sending to the event with the last one.
        tokens: that were generated.
        leads: of each token, by how much its log-probability was ahead of the next one's.
        cached_tokens: of the prompt, not computed, wherever they came from.
    """

    sent_s: float
    first_token_s: float
    last_token_s: float
    tokens: tuple[int, ...]
    leads: tuple[float, ...]
    cached_tokens: int


async def complete(socket: Path, prompt: tuple[int, ...], output_tokens: int) -> Answer:
    """The likeliest continuation of a prompt.

    Raises:
        OSError, RuntimeError: the server went away, or refused; with its words.
    """
    document = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    clock = asyncio.get_running_loop().time
    sent = clock()
    first = last = 0.0
    tokens: list[int] = []
    leads: list[float] = []
    cached = 0
    async for event in _events(socket, "/v1/completions", document):
        for choice in event["choices"]:
            if choice.get("token_ids"):
                last = clock() - sent
                first = first or last
                tokens += choice["token_ids"]
                leads += map(_lead, choice["logprobs"]["top_logprobs"])
        if usage := event.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if len(tokens) != output_tokens:
        raise RuntimeError(f"{len(tokens)} tokens came for {output_tokens}")
    return Answer(sent, first, last, tuple(tokens), tuple(leads), cached)


async def ask(socket: Path, method: str, target: str) -> bytes:
    """One request without a body; what the server answers.

    Raises:
        OSError, RuntimeError: as `complete`.
    """
    return b"".join([piece async for piece in _exchange(socket, method, target, b"")])


def _lead(likeliest: dict[str, float]) -> float:
    """How far the likeliest token is ahead of the second."""
    first, second = sorted(likeliest.values(), reverse=True)[:2]
    return first - second


async def _events(socket: Path, target: str, document: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events of an answer, each a JSON object, without the mark of the end."""
    rest = b""
    async for piece in _exchange(socket, "POST", target, json.dumps(document).encode()):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(_EVENT) and (data := line.removeprefix(_EVENT).strip()) != _LAST_EVENT:
                event = json.loads(data)
                if "choices" not in event:
                    raise RuntimeError(f"the server broke off: {data.decode(errors='replace')}")
                yield event


async def _exchange(socket: Path, method: str, target: str, body: bytes) -> AsyncIterator[bytes]:
    """Send a request on a connection of its own; the pieces of the answer as they come."""
    reader, writer = await asyncio.open_unix_connection(socket, limit=_LINE_BYTES_MAX)
    try:
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        status, is_chunked = await _read_head(reader)
        if status != 200:
            words = b"".join([piece async for piece in _read_body(reader, is_chunked=is_chunked)])
            raise RuntimeError(f"{target} was refused with {status}: {words.decode(errors='replace')}")
        async for piece in _read_body(reader, is_chunked=is_chunked):
            yield piece
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Status, and whether the body comes in chunks."""
    async with asyncio.timeout(_TIMEOUT_S):
        head = await reader.readuntil(b"\r\n\r\n")
    status_line, *fields = head.decode("latin-1").lower().split("\r\n")
    return int(status_line.split()[1]), "transfer-encoding: chunked" in fields


async def _read_body(reader: asyncio.StreamReader, *, is_chunked: bool) -> AsyncIterator[bytes]:
    """The pieces of a body; one that does not come in chunks ends with the connection."""
    while True:
        async with asyncio.timeout(_TIMEOUT_S):
            if not is_chunked:
                piece = await reader.read(_LINE_BYTES_MAX)
            elif size := int(await reader.readline(), 16):
                piece = (await reader.readexactly(size + 2))[:-2]
            else:
                piece = b""
        if not piece:
            return
        yield piece
