"""Completions over HTTP on a Unix socket, with everything that tells two of them apart."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK_SIZE = 32
#: Of one request. A server that was stopped for a while, or whose cache does not answer, is slow and must not fail.
RESPONSE_TIMEOUT_S = 120
TOP_LOGPROBS = 4
#: What may differ where sums are formed in another order: by two shards, or when a preempted request is computed again.
ROUNDING = 1e-4


class UnixConnection(http.client.HTTPConnection):
    """HTTP to a socket in the file system."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=RESPONSE_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask(path: Path, method: str, target: str, document: Any = None) -> bytes:
    """One request with a connection of its own.

    Raises:
        OSError: nobody is there, or it went away.
        AssertionError: the server refused, with its words.
    """
    connection = UnixConnection(path)
    try:
        body = None if document is None else json.dumps(document)
        connection.request(method, target, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    assert response.status == http.client.OK, f"{response.status}: {answer.decode()}"
    return answer


@dataclass(frozen=True, slots=True)
class Completion:
    """What a server made of a prompt. Floats are those of the server to the last bit: JSON carries them exactly."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[str, float], ...], ...]  #: of each token: it and the likeliest others
    prompt_logprobs: str = ""
    cached_tokens: int = field(default=0, compare=False)  #: not computed, wherever they came from
    kv_transfer_params: Any = field(default=None, compare=False)  #: what the connector says

    def distance(self, other: Completion) -> float:
        """The largest difference of a log-probability; infinite where the tokens differ."""
        return float("inf") if self.tokens != other.tokens else largest_difference(self.logprobs, other.logprobs)


def largest_difference(
    mine: Iterable[Iterable[tuple[Any, float]]], others: Iterable[Iterable[tuple[Any, float]]]
) -> float:
    """Of the log-probability of a token that both have at the same position."""
    return max(
        abs(here[token] - there[token])
        for here, there in zip(map(dict, mine), map(dict, others), strict=True)
        for token in here.keys() & there.keys()
    )


def complete(
    path: Path, prompt: Iterable[int], *, model: str = "tiny", tokens: int = 8, **options: object
) -> Completion:
    """The likeliest continuation of a prompt; `options` as vLLM's completions API names them."""
    document = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": TOP_LOGPROBS,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **options,
    }
    answer = json.loads(ask(path, "POST", "/v1/completions", document))
    (choice,) = answer["choices"]
    return Completion(
        tokens=tuple(choice["token_ids"]),
        logprobs=tuple(tuple(sorted(likeliest.items())) for likeliest in choice["logprobs"]["top_logprobs"]),
        prompt_logprobs=json.dumps(choice["prompt_logprobs"], sort_keys=True),
        cached_tokens=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        kv_transfer_params=answer.get("kv_transfer_params"),
    )


def metric(path: Path, name: str) -> float:
    """A counter of the server, summed over its labels; 0 where nothing was counted yet."""
    text = ask(path, "GET", "/metrics").decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))


def random_tokens(seed: str, blocks: int) -> list[int]:
    """A prompt of full blocks that no other seed begins with."""
    source = random.Random(seed)
    return [source.randrange(3, 512) for _ in range(blocks * BLOCK_SIZE)]
