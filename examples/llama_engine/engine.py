"""The engine in one object: a session with the daemon, a scheduler, and its shard processes."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from examples.llama_engine.config import EngineSettings, read_config
from examples.llama_engine.generation import GenerationRequest, GenerationResult, InvalidRequest
from examples.llama_engine.scheduler import Scheduler
from examples.llama_engine.shard_group import ShardGroup
from kvcached_client import Client


class Engine:
    """A Llama on `settings.tp` shard processes whose KV cache lives in the daemon.

    The calling process is the scheduler; it never touches the cache's memory and never imports torch.
    """

    def __init__(self, settings: EngineSettings) -> None:
        """Open the session and start the shards.

        Raises:
            KvcachedError: no daemon there, or its pool is held by another engine.
            ModelError: no such model, or the pool was made for another.
            ShardDied: a shard could not start.
        """
        config = read_config(settings.model_dir)
        self._vocab_size = config.vocab_size
        self._client = Client.connect(settings.run_dir, replica=settings.replica)
        try:
            config.check_pool(self._client.layout, settings.tp)
            self._shards = ShardGroup(settings, self._client.session)
        except BaseException:
            self._client.close()
            raise
        self._scheduler = Scheduler(self._client, self._shards, settings.limits)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Run requests together; results in the order of the requests.

        Raises:
            InvalidRequest: a token is outside the vocabulary; nothing was started.
            KvcachedError, ShardDied: the engine cannot go on and must be closed.
        """
        for request in requests:
            if not 0 <= min(request.prompt) <= max(request.prompt) < self._vocab_size:
                raise InvalidRequest(f"prompt holds a token outside [0, {self._vocab_size})")
        names = [self._scheduler.submit(request) for request in requests]
        results: dict[str, GenerationResult] = {}
        while not self._scheduler.idle:
            results.update((result.name, result) for result in self._scheduler.step())
        return [results[name] for name in names]

    def close(self) -> None:
        """End the shards, then the session: in this order, for a session that said goodbye must not write any more."""
        self._shards.close()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
