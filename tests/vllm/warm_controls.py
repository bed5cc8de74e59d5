"""What engines on memory of the daemon must not adopt, and that the comparison sees it where they do.

Each control has two trials: of engines as they are, which must adopt nothing and answer rightly, and of engines with a
fault (`warm_forks.FAULTS`) that adopt all the same, whose answers must be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcached_client import Admin
from tests.vllm.warm_loop import PROMPTS, ROOMY, Life, WarmLoop

_ORDER = list(range(PROMPTS))
_OTHER_ORDER = _ORDER[::-1]
#: Memory of another size is other memory.
_SIZE_STEP = 1 << 20


#: As vLLM does on GPUs.
_ALWAYS = ("async_scheduling",)


@dataclass(frozen=True)
class Trial:
    """What the engines of a trial have done.

    Attributes:
        adopted: blocks that they found in their memory, and should not have.
        answers: that were compared.
        wrong: of these.
    """

    adopted: int
    answers: int
    wrong: int


@dataclass(frozen=True)
class Control:
    """The trials without and with faults."""

    as_they_are: Trial
    faulty: Trial

    @property
    def is_right(self) -> bool:
        """Whether the first trial adopts nothing and answers rightly, and wrong answers of the second are seen."""
        return self.as_they_are.adopted == self.as_they_are.wrong == 0 < self.faulty.wrong


class Controls:
    """The controls of engines that `loop` runs; each trial has memory of its own.

    Args:
        loop: running, with `PROMPTS` prompts or more.
        others: a model of the same shape and name with other weights.
    """

    def __init__(self, loop: WarmLoop, others: Path) -> None:
        self._loop = loop
        self._others = others
        self._size = ROOMY

    def stale_epoch(self) -> Control:
        """An engine whose scheduler has no table overwrites what its rows name; the next one has the table again."""
        return Control(self._stale_epoch(), self._stale_epoch("keep_epoch"))

    def other_weights(self) -> Control:
        """The next engine has other weights."""
        expected = {answer.number: answer.tokens for answer in self._loop.stock(self._others).answers}
        return Control(self._other_weights(expected), self._other_weights(expected, "any_weights"))

    def lost_rank(self) -> Control:
        """The second rank of the next engine has other memory than before, and of the one after that its old one."""
        return Control(self._lost_rank(), self._lost_rank("any_memory"))

    def cleared(self) -> Trial:
        """What is adopted after a clear of the namespace. There is no faulty trial: the bytes are still right."""
        self._fill()
        with Admin.connect(self._loop.daemon.run_dir) as admin:
            for host in admin.stats().hosts:
                admin.clear(host.namespace)
        return self._trial([self._live()])

    def _stale_epoch(self, *faults: str) -> Trial:
        self._fill()
        behind = self._loop.live(self._size, _OTHER_ORDER, faults=[*_ALWAYS, "no_table", *faults])
        return self._trial([behind, self._live()])

    def _other_weights(self, expected: dict[int, list[int]], *faults: str) -> Trial:
        self._fill()
        life = self._loop.live(self._size, _ORDER, faults=[*_ALWAYS, *faults], model=self._others)
        return self._trial([life], expected)

    def _lost_rank(self, *faults: str) -> Trial:
        self._fill()
        elsewhere = self._loop.live(self._size, _OTHER_ORDER, faults=[*_ALWAYS, "new_memory", *faults])
        return self._trial([elsewhere, self._live()])

    def _fill(self) -> None:
        """Have an engine on new memory compute everything."""
        self._size += _SIZE_STEP
        life = self._live()
        assert not life.adopted, life.adopted
        assert not life.wrong(self._loop.expected)

    def _live(self) -> Life:
        return self._loop.live(self._size, _ORDER, faults=_ALWAYS)

    def _trial(self, lives: Sequence[Life], expected: dict[int, list[int]] | None = None) -> Trial:
        wrong = sum(life.wrong(expected or self._loop.expected) for life in lives)
        return Trial(sum(life.adopted for life in lives), sum(len(life.answers) for life in lives), wrong)
