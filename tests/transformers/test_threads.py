"""One `PromptCache` in several threads, in signal handlers and in forked children."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers.cache_utils import DynamicCache

from kvcached_client.offload_shard import OffloadShard
from kvcached_client.transformers import PromptCache
from kvcached_client.transformers.model import tensors_of
from kvcached_client.transformers.staging import Staging
from tests.project.daemon_process import running_daemon
from tests.transformers.models import llama, tokens
from tests.transformers.test_caches import computed
from tests.transformers.test_prompt_cache import CONFIG

#: How long a call would have to take to begin, if it did not wait for the other one.
BEGINS_S = 0.3
PROMPTS = (tokens(65, 1), tokens(65, 2))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One daemon; each test has a model of its own."""
    directory = tmp_path_factory.mktemp("daemon") / "run"
    with running_daemon(CONFIG, directory):
        yield directory


class Held:
    """Holds the first thread that calls a method, behind the call, until another thread has had time to get there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type, method: str) -> None:
        self.there, self.go_on, original = threading.Event(), threading.Event(), getattr(kind, method)

        def held(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            if not self.there.is_set():
                self.there.set()
                self.go_on.wait(10)
            return result

        monkeypatch.setattr(kind, method, held)

    def run(self, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
        """The results of two calls, of which the second comes while the first is held."""
        with ThreadPoolExecutor(2) as threads:
            one: Future[Any] = threads.submit(first)
            self.there.wait(10)
            other: Future[Any] = threads.submit(second)
            with pytest.raises(TimeoutError):
                other.result(BEGINS_S)
            self.go_on.set()
            return one.result(10), other.result(10)


def is_of(cache: DynamicCache, whole: DynamicCache) -> bool:
    """Whether a cache holds the first 64 tokens of another one."""
    pairs = zip(tensors_of(cache), tensors_of(whole), strict=True)
    return all(torch.equal(one, other[:, :, :64]) for one, other in pairs)


@pytest.mark.parametrize(("kind", "method"), [(Staging, "fill"), (OffloadShard, "load")])
def test_calls_of_threads_wait_for_each_other(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: type, method: str
) -> None:
    """While one thread's blocks are in the buffer, no other thread stores or loads any: all get their own."""
    model = llama(40 + (kind is Staging))
    whole = [computed(model, prompt) for prompt in PROMPTS]
    with PromptCache.connect(model, run_dir) as prompts:
        store, load = prompts.store, prompts.load
        if kind is Staging:
            held = Held(monkeypatch, kind, method)
            stored = held.run(lambda: store(PROMPTS[0], whole[0]), lambda: store(PROMPTS[1], whole[1]))
            assert stored == (64, 64)
            assert all(is_of(load(prompt), each) for prompt, each in zip(PROMPTS, whole, strict=True))
        else:
            assert [store(*each) for each in zip(PROMPTS, whole, strict=True)] == [64, 64]
            held = Held(monkeypatch, kind, method)
            loaded = held.run(lambda: load(PROMPTS[0]), lambda: load(PROMPTS[1]))
            assert all(map(is_of, loaded, whole))


def test_load_waits_for_a_store(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a load puts into the buffer is not stored under the keys of another prompt."""
    model = llama(42)
    whole = [computed(model, prompt) for prompt in PROMPTS]
    with PromptCache.connect(model, run_dir) as prompts:
        assert prompts.store(PROMPTS[0], whole[0]) == 64
        held = Held(monkeypatch, Staging, "fill")
        _, loaded = held.run(lambda: prompts.store(PROMPTS[1], whole[1]), lambda: prompts.load(PROMPTS[0]))
        assert is_of(loaded, whole[0])
        assert is_of(prompts.load(PROMPTS[1]), whole[1])


def test_close_waits_for_a_store(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread is storing is stored."""
    model = llama(43)
    whole = computed(model, PROMPTS[0])
    prompts = PromptCache.connect(model, run_dir)
    held = Held(monkeypatch, Staging, "fill")
    assert held.run(lambda: prompts.store(PROMPTS[0], whole), prompts.close) == (64, None)
    with pytest.raises(ValueError, match="is closed"):
        prompts.load(PROMPTS[0])


def test_call_of_a_signal_handler_inside_a_call_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever; the call that it has interrupted goes on, and an exception ends the turn."""
    model = llama(44)
    whole = computed(model, PROMPTS[0])
    with PromptCache.connect(model, run_dir) as prompts:
        fill = Staging.fill

        def interrupted(*args: Any) -> None:
            for call in (lambda: prompts.load(PROMPTS[0]), prompts.close):
                with pytest.raises(RuntimeError, match="let the handler raise an exception or set a flag"):
                    call()
            fill(*args)

        with monkeypatch.context() as patched:
            patched.setattr(Staging, "fill", interrupted)
            assert prompts.store(PROMPTS[0], whole) == 64
        with monkeypatch.context() as patched:
            patched.setattr(OffloadShard, "load", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                prompts.load(PROMPTS[0])
        assert is_of(prompts.load(PROMPTS[0]), whole)


def test_forked_child_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is forked while a thread is inside a call, which it would wait for; its close harms nobody."""
    model = llama(45)
    whole = computed(model, PROMPTS[0])

    def in_child() -> int:
        child = os.fork()
        if not child:
            try:
                prompts.load(PROMPTS[0])
            except RuntimeError as error:
                prompts.close()
                os._exit(0 if "a forked child connects its own" in str(error) else 1)
            os._exit(2)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    with PromptCache.connect(model, run_dir) as prompts:
        held = Held(monkeypatch, Staging, "fill")
        with ThreadPoolExecutor(1) as threads:
            stored = threads.submit(lambda: prompts.store(PROMPTS[0], whole))
            held.there.wait(10)
            assert in_child() == 0
            held.go_on.set()
            assert stored.result(10) == 64
        assert is_of(prompts.load(PROMPTS[0]), whole)
