"""Many short completions at once against a vLLM server, and what the server itself says of them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.replay_http import MODEL_NAME, ask

#: Of one answer.
_TIMEOUT_S: Final = 300.0
_COUNTERS: Final = {
    "queued_s": "vllm:request_queue_time_seconds_sum",
    "first_tokens_s": "vllm:time_to_first_token_seconds_sum",
    "requests": "vllm:request_queue_time_seconds_count",
    "steps": "vllm:iteration_tokens_total_count",
    "hit_tokens": "vllm:external_prefix_cache_hits_total",
    "late": "vllm:kvcached_late_requests_total",
}


class Counters(NamedTuple):
    """Sums that a server has counted since its start; 0 for what it does not count.

    Attributes:
        queued_s: time that requests waited in its queue.
        first_tokens_s: from a request's arrival to its first token.
        requests: that were scheduled.
        steps: of its engine that brought tokens.
        hit_tokens: of prompts that came from the connector.
        late: requests that went without the cache because its answer was late.
    """

    queued_s: float
    first_tokens_s: float
    requests: float
    steps: float
    hit_tokens: float
    late: float

    def since(self, before: Counters) -> Counters:
        """What was counted in between."""
        return Counters(*(now - then for now, then in zip(self, before, strict=True)))


async def read_counters(socket: Path) -> Counters:
    """Ask a server for its counters."""
    text = (await ask(socket, "GET", "/metrics")).decode()
    return Counters(
        **{
            name: sum(map(float, re.findall(rf"^{re.escape(metric)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)))
            for name, metric in _COUNTERS.items()
        }
    )


async def complete_all(
    socket: Path, prompts: Sequence[Sequence[int]], *, output_tokens: int, at_once: int
) -> list[list[int]]:
    """The likeliest continuation of each prompt. So many clients send them, each its next one after the answer.

    Every client has one connection, and gets each answer in one piece: the client's own work is kept small.

    Raises:
        OSError, RuntimeError: the server went away, or refused; with its words.
    """
    outputs: list[list[int]] = [[] for _ in prompts]
    places = iter(range(len(prompts)))

    async def client() -> None:
        reader, writer = await asyncio.open_unix_connection(socket)
        try:
            for place in places:
                writer.write(_request(prompts[place], output_tokens))
                async with asyncio.timeout(_TIMEOUT_S):
                    answer = await _answer(reader)
                outputs[place] = answer["choices"][0]["token_ids"]
        finally:
            writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())
    return outputs


def _request(prompt: Sequence[int], output_tokens: int) -> bytes:
    document = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    body = json.dumps(document).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _answer(reader: asyncio.StreamReader) -> dict[str, list[dict[str, list[int]]]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = re.search(r"content-length: (\d+)", head)
    if length is None:
        raise RuntimeError(f"an answer without a length: {head}")
    body = await reader.readexactly(int(length.group(1)))
    if int(head.split()[1]) != 200:
        raise RuntimeError(f"the request was refused: {body.decode(errors='replace')}")
    answer: dict[str, list[dict[str, list[int]]]] = json.loads(body)
    return answer
