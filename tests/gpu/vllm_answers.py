"""Whether stock vLLM answers on a device as it does without kvcached: ``python -m tests.gpu.vllm_answers``.

Needs vLLM beside what kvcached needs. Small models with random weights answer prompts one after the other: an engine
without a connector first, then, for each of `KINDS`, engines with one, on one daemon. What is computed must be answered
as the first engine has answered, and what comes from the daemon as the first engine has answered from its own prefix
cache: each token and each log-probability, to the last bit, and as much must be found. Among the engines one is killed
at work, and the daemon as well. A control, an engine whose loads copy nothing, shows that the comparison sees wrong
blocks.

JSON on stdout; status 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple

from kvcached_client import Admin
from tests.gpu.vllm_engine import (
    EAGER,
    GRAPHS,
    OPTIONS,
    Engine,
    Place,
    Prompt,
    Report,
    connected,
    describe_model,
    place,
)
from tests.vllm.tiny_hybrid import FAMILIES
from tests.vllm.tiny_model import VOCABULARY, Shape, model_weights, write

#: Of a prompt, without the number of the prompt, and without what it shares with others: as many again.
_TOKENS: Final = 300
_DAEMON: Final = {"device_memory": "daemon"}
_HYBRID: Final = "KvcachedHybridConnector"
#: So long an engine works before it is killed.
_WORK_S: Final = 0.2


@dataclass(frozen=True)
class Kind:
    """What engines are like.

    Attributes:
        model: its family, of `tiny_hybrid`, or plain.
        options: of `vllm.LLM`.
        connector: the class of the connector.
        settings: of the connector.
    """

    model: str = "plain"
    options: Report = field(default_factory=lambda: EAGER)
    connector: str = "KvcachedConnector"
    settings: Report = field(default_factory=dict)


#: What any device takes.
_USUAL: Final = {
    "process": Kind(),
    "thread": Kind(settings={"copies": "thread"}),
    "daemon": Kind(settings=_DAEMON),
    "triton": Kind(options=EAGER | {"attention_backend": "TRITON_ATTN"}),
    "graphs": Kind(options=GRAPHS),
    "windows": Kind(model="gemma3", connector=_HYBRID),
    "windows-daemon": Kind(model="gemma3", connector=_HYBRID, settings=_DAEMON),
    "states": Kind(model="lfm2", connector=_HYBRID),
    "states-daemon": Kind(model="lfm2", connector=_HYBRID, settings=_DAEMON),
    "latent": Kind(model="deepseek"),
    "latent-daemon": Kind(model="deepseek", settings=_DAEMON),
}
#: FlashMLA, which is for Hopper's devices alone, takes blocks of 64 tokens, of which each of vLLM's is two.
_DIVIDED: Final = EAGER | {"attention_backend": "FLASHMLA", "block_size": 128}
KINDS: Final = _USUAL | {
    "divided": Kind(model="deepseek", options=_DIVIDED),
    "divided-daemon": Kind(model="deepseek", options=_DIVIDED, settings=_DAEMON),
}


class Answers(NamedTuple):
    """To all prompts: computed, and with what vLLM has in its own prefix cache."""

    computed: list[Report]
    cached: list[Report]


#: Of a plain model, and of one with windows.
_SHAPE: Final = Shape(layers=4, heads=8, kv_heads=4, head_dim=128)
#: Tokens of a window, or of a convolution.
_WIDTHS: Final = {"gemma3": 128, "lfm2": 4}


class Trial:
    """Of one kind of engines, in one place.

    Args:
        where: the place.
        name: of the kind.
        prompts: how many each engine answers.
        known: answers of engines without a connector, by their options; gets those that are missing.
    """

    def __init__(self, where: Place, name: str, prompts: int, known: dict[str, Answers]) -> None:
        self._where, self._name, self._kind = where, name, KINDS[name]
        # With several groups, vLLM by itself does not find all that prompts share, and computes it in larger pieces.
        shared_tokens = 0 if self._kind.connector == _HYBRID else _TOKENS
        self._prompts = prompts_of(random.Random(1), prompts, shared_tokens=shared_tokens)
        self._options = self._options_of(self._kind)
        key = json.dumps(self._options, sort_keys=True)
        if key not in known:
            known[key] = self._answers()
        self._expected = known[key]

    def run(self) -> Report:
        """Engines one after the other, with a kill of one, and of the daemon."""
        first = self._start()
        report: Report = {"backends": first.backends, "start_s": first.start_s}
        report["computed"] = self._judged(first, self._expected.computed)
        report["after_a_reset"] = self._judged(first, self._expected.cached, forget=True)
        first.stop()
        second = self._start()
        report["next_engine"] = self._judged(second, self._expected.cached)
        second.kill_at_work(prompts_of(random.Random(2), 64), _WORK_S)
        if self._kind.settings == _DAEMON:
            report["after_the_kill"] = self._without_the_host_pool()
        self._where.daemon.kill_and_wait()
        last = self._start()
        report["killed_daemon"] = self._judged(last, self._expected.cached, forget=True)
        last.stop()
        return report | {"ok": all(each["ok"] for each in report.values() if isinstance(each, dict))}

    def control(self) -> Report:
        """An engine that loads nothing, and says that it has: the comparison must see that its answers are wrong."""
        filling = self._start()
        filling.ask(self._prompts)
        filling.ask(self._prompts[:1], forget=True)  # it forgets once all stores are over
        filling.stop()
        faulty = self._start(loads_nothing=True)
        report = self._judged(faulty, self._expected.cached)
        faulty.stop()
        return report | {"ok": report["tokens_found"] > 0 and report["right_to_the_last_bit"] == 0}

    def _without_the_host_pool(self) -> Report:
        """What is found then is found in device memory, which has outlived the killed engine."""
        with Admin.connect(self._where.daemon.run_dir) as admin:
            admin.pause()
            engine = self._start()
            report = self._judged(engine, self._expected.cached)
            engine.stop()
            admin.resume()
        return report

    def _judged(self, engine: Engine, expected: Sequence[Report], *, forget: bool = False) -> Report:
        """How many answers are as they should be, and how many tokens of prompts were found."""
        answers = engine.ask(self._prompts, forget=forget)["answers"]
        pairs = list(zip(answers, expected, strict=True))
        right = sum(mine["tokens"] == its["tokens"] and mine["logprobs"] == its["logprobs"] for mine, its in pairs)
        found, findable = (sum(each["cached"] for each in some) for some in (answers, expected))
        return {
            "ok": right == len(pairs) and found >= findable,
            "answers": len(pairs),
            "right_to_the_last_bit": right,
            "with_the_same_tokens": sum(mine["tokens"] == its["tokens"] for mine, its in pairs),
            "tokens_found": found,
            "tokens_that_vllm_finds_itself": findable,
        }

    def _answers(self) -> Answers:
        """Of an engine without a connector."""
        engine = self._where.forks.start(self._options)
        answers = Answers(*(engine.ask(self._prompts)["answers"] for _ in range(2)))
        engine.stop()
        return answers

    def _start(self, *, loads_nothing: bool = False) -> Engine:
        settings = {"weights_version": self._name, **self._kind.settings}
        options = connected(self._options, self._kind.connector, settings)
        return self._where.forks.start(options, loads_nothing=loads_nothing)

    def _options_of(self, kind: Kind) -> Report:
        folder = self._where.folder / kind.model
        if not folder.exists():
            shape = replace(_SHAPE, window=_WIDTHS.get(kind.model, 0))
            make: Callable[[Shape], tuple[Report, Any]] = FAMILIES.get(kind.model, _plain)
            config, weights = make(shape)
            describe_model(folder, config)
            write(folder, weights, "model.safetensors", {})
        sizes = {"max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 2048}
        return OPTIONS | sizes | {"kv_cache_memory_bytes": 256 << 20, "model": str(folder)} | kind.options


def _plain(shape: Shape) -> tuple[Report, Any]:
    return shape.config(), model_weights(shape, 0)


def prompts_of(source: random.Random, count: int, *, shared_tokens: int = _TOKENS) -> list[Prompt]:
    """Every third begins with the same tokens, and most end within a block."""
    shared = tokens_of(source, shared_tokens)
    return [[*(shared if number % 3 == 0 else ()), *tokens_of(source, _TOKENS + number)] for number in range(count)]


def tokens_of(source: random.Random, count: int) -> list[int]:
    """Tokens of a prompt that no other one begins with."""
    return [source.randrange(3, VOCABULARY) for _ in range(count)]


def main() -> int:
    """All kinds and the control, or what is asked for."""
    parser = argparse.ArgumentParser(description="stock vLLM's answers on a device, with and without kvcached")
    parser.add_argument("--kinds", nargs="*", default=list(_USUAL), choices=KINDS, help="default: all but divided")
    parser.add_argument("--prompts", type=int, default=6, help="of each engine (default: %(default)s)")
    parser.add_argument("--host-gib", type=float, default=2, help="of the host pool (default: %(default)s)")
    parser.add_argument("--device-gib", type=float, default=2, help="for engines' memory (default: %(default)s)")
    arguments = parser.parse_args()
    report: Report = {}
    with place(host_gib=arguments.host_gib, device_gib=arguments.device_gib) as where:
        known: dict[str, Answers] = {}
        for name in arguments.kinds:
            _note(report, name, partial(_kind, where, name, arguments.prompts, known))
        _note(report, "control", partial(_control, where, arguments.prompts, known))
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 0 if all(each["ok"] for each in report.values()) else 1


def _kind(where: Place, name: str, prompts: int, known: dict[str, Answers]) -> Report:
    return Trial(where, name, prompts, known).run()


def _control(where: Place, prompts: int, known: dict[str, Answers]) -> Report:
    return Trial(where, "process", prompts, known).control()


def _note(report: Report, name: str, trial: Callable[[], Report]) -> None:
    """A trial that fails to the report; the next one may still tell something."""
    began = time.monotonic()
    try:
        report[name] = trial()
    except (AssertionError, OSError, RuntimeError, ValueError):
        report[name] = {"ok": False, "error": traceback.format_exc()[-4000:]}
    report[name]["took_s"] = time.monotonic() - began
    sys.stderr.write(f"{name}: {json.dumps(report[name])}\n")


if __name__ == "__main__":
    sys.exit(main())
