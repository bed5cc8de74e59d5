"""The engine in one object: its cache, a scheduler, and its shard processes."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from examples.llama_engine.attached_cache import AttachedCache, open_attached
from examples.llama_engine.cache import Cache
from examples.llama_engine.config import EngineSettings, LlamaConfig, read_config
from examples.llama_engine.generation import GenerationRequest, GenerationResult, InvalidRequest
from examples.llama_engine.managed_cache import ManagedCache
from examples.llama_engine.scheduler import Scheduler
from examples.llama_engine.shard_group import ShardGroup
from kvcached_client import Client


class Engine:
    """A Llama on `settings.tp` shard processes.

    Its KV cache lives in the daemon, or, in attached mode, in the shards, with the daemon's host pool behind it.

    The calling process is the scheduler; it never touches the cache's memory and never imports torch.
    """

    def __init__(self, settings: EngineSettings) -> None:
        """Start the shards and open the session. In offload mode the engine starts without a daemon, too.

        Raises:
            KvcachedError: no daemon there, or its pool is held by another engine.
            ModelError: no such model, or the pool was made for another.
            ShardDied: a shard could not start.
        """
        config = read_config(settings.model_dir)
        self._vocab_size = config.vocab_size
        opened = open_attached if settings.attached else _open_managed
        self._cache: Cache
        self._cache, self._shards = opened(settings, config)
        self._scheduler = Scheduler(self._cache, self._shards, settings.limits)

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
        if isinstance(self._cache, AttachedCache):
            self._cache.drain()  # nothing else is to be done; what was computed can be found from here on
        return [results[name] for name in names]

    def close(self) -> None:
        """End the shards, then the session: in this order, for a session that said goodbye must not write any more."""
        self._shards.close()
        self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _open_managed(settings: EngineSettings, config: LlamaConfig) -> tuple[ManagedCache, ShardGroup]:
    client = Client.connect(settings.run_dir, replica=settings.replica, reserve_blocks=settings.reserve_blocks)
    try:
        config.check_pool(client.layout, settings.tp)
        shards = ShardGroup(settings, client.session)
        return ManagedCache(client, shards.remap), shards
    except BaseException:
        client.close()
        raise
