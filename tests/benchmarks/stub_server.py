"""A completions server of a few lines: it streams token ids as vLLM does, in pieces that split where they like."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

Reply = Callable[[dict[str, Any]], bytes]


def stream(document: dict[str, Any]) -> bytes:
    """The events for a request: the ids after its last one, and one event without a token before them."""
    first = document["prompt"][-1] + 1
    events: list[dict[str, Any]] = [{"choices": [{"token_ids": None, "logprobs": None}]}]
    for token in range(first, first + document["max_tokens"]):
        likeliest = {f"token_id:{token}": -0.5, "token_id:0": -0.75}
        events.append({"choices": [{"token_ids": [token], "logprobs": {"top_logprobs": [likeliest]}}]})
    events.append({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 7}}})
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"


def break_off(document: dict[str, Any]) -> bytes:
    """An error in the stream, as a server sends it that fails in the middle."""
    del document
    return b'data: {"error": {"message": "out of luck"}}\n\n'


@asynccontextmanager
async def serving(
    directory: Path, reply: Reply = stream, *, status: str = "200 OK", chunk_bytes: int = 7
) -> AsyncIterator[tuple[Path, list[dict[str, Any]]]]:
    """Such a server; its socket, and the requests that it got. A body goes out in chunks of `chunk_bytes`."""
    requests: list[dict[str, Any]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = await reader.readexactly(length)
        if body:
            requests.append(json.loads(body))
            text = reply(requests[-1])
            writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            for start in range(0, len(text), chunk_bytes):
                piece = text[start : start + chunk_bytes]
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            writer.write(b"0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n" + b'{"success":true}')
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, directory / "stub.sock")
    try:
        yield directory / "stub.sock", requests
    finally:
        server.close()
        await server.wait_closed()
