"""The KV of prompts, kept in the daemon's host pool, shared with other processes, and found again.

`PromptCache` is an engine in offload mode with one shard. It gives `generate` a cache that already holds the longest
stored beginning of a prompt, and stores what `generate` has computed.

Nothing fails because of the daemon: without it the model computes everything, and a later call tries to reach it again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Final, Self

import numpy as np
import torch
import transformers
from transformers.cache_utils import Cache, DynamicCache

from kvcached_client.engines.one_process import EngineIdentity, OneProcessEngine, OneProcessSession
from kvcached_client.keys import KeyChain
from kvcached_client.offload import PreparedStore
from kvcached_client.protocol.offload import BLOCK_SIZE_MAX
from kvcached_client.transformers.loaded_cache import cache_of
from kvcached_client.transformers.model import Model, kv_tensors
from kvcached_client.transformers.refusals import check_model, check_precision
from kvcached_client.transformers.staging import Staging
from kvcached_client.transformers.turns import Turns, by_turns
from kvcached_client.transformers.weights import identity

_log: Final = logging.getLogger("kvcached_client")


class PromptCache(Turns):
    """Stored KV of the prompts of one model. Made by `connect`; a context manager.

    Several threads may use it: a call waits until the one before it is over. A forked child connects its own.

    The model must stay as it is: after a change of its weights or its code, connect again.
    """

    def __init__(self, model: Model, run_dir: str | os.PathLike[str] | None, block_size: int, deadline_ms: int) -> None:
        """Use `connect`."""
        super().__init__()
        if type(block_size) is not int or not 1 <= block_size <= BLOCK_SIZE_MAX:
            raise ValueError(f"block_size {block_size!r}: a block has at least one token, and at most {BLOCK_SIZE_MAX}")
        check_model(model)
        self._model = model
        self._block_size = block_size
        self._is_closed = False
        self._staging = Staging(kv_tensors(model), block_size)
        self._keyspace = identity(model)
        label = model.config.name_or_path or type(model).__name__
        self._engine = OneProcessEngine(
            EngineIdentity(f"transformers {transformers.__version__}", self._keyspace, label, block_size),
            self._staging.pages,
            run_dir=run_dir,
            deadline_ms=deadline_ms,
            log=_log,
        )

    @classmethod
    def connect(
        cls,
        model: Model,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        block_size: int = 16,
        deadline_ms: int = 1000,
    ) -> Self:
        """Let the model compute one token, read its weights once for their digest, and connect to the daemon.

        Args:
            model: a text model that generates, all of whose layers have full attention, in `eval` mode.
            run_dir: directory of the daemon's sockets; default: `default_run_dir`.
            block_size: tokens in a block; whole blocks are stored and found again.
            deadline_ms: limit for one call to the daemon.

        Raises:
            ValueError: the model cannot be served, and why; or there are no such blocks.
        """
        cache = cls(model, run_dir, block_size, deadline_ms)
        with cache._engine.guarded():
            pass
        return cache

    @by_turns
    def load(self, input_ids: torch.Tensor) -> DynamicCache:
        """A cache for `generate` with the longest stored beginning of a prompt. At least one token is left to compute.

        Args:
            input_ids: the prompt, of shape [1, tokens], without padding.

        Raises:
            ValueError: several prompts at once, torch.autocast is on, or this is closed.
            RuntimeError: this process is a fork, or a signal handler has interrupted a call in the same thread.
        """
        self._check_use()
        tokens = _tokens(input_ids)
        chunks: list[list[torch.Tensor]] = []
        with self._engine.guarded() as session:
            if session is not None and not self._has_padding(tokens):
                for chunk in self._loaded(session, tokens):
                    chunks.append(chunk)  # noqa: PERF402 - what came before a failure counts
        return cache_of(self._model.config, chunks)

    @by_turns
    def store(self, sequence: torch.Tensor, cache: DynamicCache) -> int:
        """Store the full blocks of a sequence that a cache holds, as far as they are not stored.

        Args:
            sequence: of shape [1, tokens], what the cache was computed from: what `generate` returned, or the prompt.
            cache: that `generate` was given.

        Returns:
            How many tokens from the beginning of the sequence are stored now, as far as is known.

        Raises:
            ValueError: several sequences at once, the cache is none of this model and sequence, torch.autocast is on,
                or this is closed.
            RuntimeError: as `load`.
        """
        self._check_use()
        tokens = _tokens(sequence)
        if not isinstance(cache, Cache):
            raise ValueError(f"the cache is a {type(cache).__name__}: give that which generate was given")  # noqa: TRY004
        computed = int(cache.get_seq_length())
        if computed and not self._staging.fits(cache, computed):
            raise ValueError(
                "the cache holds the KV of another model, of several sequences, or not of all tokens as they were "
                "computed: give generate what load returned, or a DynamicCache or StaticCache"
            )
        if computed > len(tokens):
            raise ValueError(
                f"the cache holds {computed} tokens and the sequence has {len(tokens)}: give the whole sequence, and a "
                "cache that no assisted generation was given"
            )
        blocks = 0
        with self._engine.guarded() as session:
            if session is not None and not self._has_padding(tokens):
                for blocks in self._stored(session, tokens[:computed], cache):  # noqa: B007 - the last one counts
                    pass
        return blocks * self._block_size

    def close(self) -> None:
        """End the session, behind the calls of other threads; what is stored stays.

        `load` and `store` raise ValueError from then on. A forked child ends nothing, as the session is its parent's.

        Raises:
            RuntimeError: a signal handler has interrupted a call in the same thread. The session goes on.
        """
        if not self.is_forked:
            self._end()

    @by_turns
    def _end(self) -> None:
        self._is_closed = True
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what cannot be served ----------------------------------------------------------------------------------------

    def _check_use(self) -> None:
        if self._is_closed:
            raise ValueError("the PromptCache is closed: connect another one")
        check_precision(self._model)

    def _has_padding(self, tokens: Sequence[int]) -> bool:
        """Whether `generate` takes a token for padding, and hides it from the others, where it is given no mask."""
        config = getattr(self._model, "generation_config", None)
        padding, end = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
        ends = end if isinstance(end, list) else [end]
        return padding not in [None, *ends] and padding in tokens

    # --- copies -------------------------------------------------------------------------------------------------------

    def _loaded(self, session: OneProcessSession, tokens: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        """The stored beginning of a prompt, some blocks at a time."""
        chain = KeyChain(self._keyspace, self._block_size, tokens, keeps_tokens=session.client.tells_tokens)
        session.fetch(chain.keys, len(tokens), token_ids=chain.token_range(0, chain.block_count))
        with session.lease(chain.keys, len(tokens), full=False) as (lease, hit, _, _):
            for start in range(0, hit, self._staging.blocks):
                count = min(self._staging.blocks, hit - start)
                plan = session.client.prepare_load(lease, start, count)
                bad = session.shard.load(plan.job(chain.keys, range(count), first=start))
                good = min(bad, default=count)
                if good:
                    yield self._staging.take(good)
                if good < count:
                    return

    def _stored(self, session: OneProcessSession, tokens: Sequence[int], cache: DynamicCache) -> Iterator[int]:
        """Store a sequence some blocks at a time; how many are stored, after each time."""
        chain = KeyChain(self._keyspace, self._block_size, tokens, keeps_tokens=session.client.tells_tokens)
        with session.lease(chain.keys, len(tokens), full=True) as (lease, hit, _, _):
            yield (depth := hit)
            while depth < chain.block_count:
                stop = min(depth + self._staging.blocks, chain.block_count)
                told = chain.token_range(depth, stop)
                plan = session.client.prepare_store(lease, depth, chain.key_range(depth, stop), told)
                if plan.transfer and not self._copied(session, chain, plan, cache):
                    return
                if plan.depth <= depth:
                    return  # the host pool has no room
                depth = plan.depth
                yield depth

    def _copied(self, session: OneProcessSession, chain: KeyChain, plan: PreparedStore, cache: DynamicCache) -> bool:
        """Make a prepared store, or call it off; False if the buffer has no room for its blocks."""
        if sum(piece.blocks for piece in plan.pieces) > self._staging.blocks:
            session.client.cancel_store(plan.transfer, "copies of earlier blocks were lost, too many at once")
            return False
        places, used = np.zeros(chain.block_count, np.int64), 0
        try:
            for piece in plan.pieces:
                start, stop = piece.start, piece.start + piece.blocks
                self._staging.fill(used, cache, start, stop)
                places[start:stop] = np.arange(used, used + piece.blocks)
                used += piece.blocks
        except BaseException as error:
            session.client.cancel_store(plan.transfer, f"{type(error).__name__}: {error}")
            raise
        session.shard.store(plan.job(chain.keys, places))
        return True


def _tokens(sequence: torch.Tensor) -> list[int]:
    if not isinstance(sequence, torch.Tensor):
        fix = "give its .sequences" if hasattr(sequence, "sequences") else "give a tensor of shape [1, tokens]"
        raise ValueError(f"tokens in a {type(sequence).__name__}: {fix}")  # noqa: TRY004 - as of any other wrong tokens
    if sequence.ndim != 2 or sequence.shape[0] != 1:  # noqa: PLR2004 - a batch, and tokens
        raise ValueError(f"tokens of shape {list(sequence.shape)}: one sequence at a time, [1, tokens]")
    if sequence.is_floating_point() or sequence.is_complex() or sequence.dtype is torch.bool:
        raise ValueError(f"tokens of {sequence.dtype}: give whole numbers, as the tokenizer returns them")
    tokens: list[int] = sequence[0].tolist()
    return tokens
