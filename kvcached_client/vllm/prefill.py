"""How many tokens of prompts vLLM computes in a second, for the daemon to weigh a fetch from storage against.

It is measured where vLLM decides and hears of results, so it holds all that a prompt waits for, on every device. Loads
of kvcached never block a step: none of its time is theirs.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import Final

from kvcached_client.vllm.tracked import Step, Tracked

#: What a step weighs after a later one, where that is as large as the largest so far; smaller ones replace less.
_FADING: Final = 0.9
#: A step that took longer than so many times what was expected counts as that: it stood still for some other reason,
#: or is small, and says little of long prompts.
_SLOWNESS_MAX: Final = 4.0
#: Steps after which there is an answer: the first ones may warm up, or compile.
_STEPS_MIN: Final = 4
#: Steps that vLLM may have on their way. It has one, and two where it schedules asynchronously.
_STEPS_UNDER_WAY_MAX: Final = 16


class PrefillRate:
    """Seconds = tokens / rate: a least-squares line through the origin in which old steps fade.

    Squares make large steps count most. A small one takes nearly as long as a larger one would, so that its tokens
    over its time are far below what a long prompt gets, whose steps are full.
    """

    def __init__(self) -> None:
        self._steps = self._largest = 0
        self._xx = self._xy = 0.0  #: sums of tokens * tokens, and of tokens * seconds

    @property
    def tokens_per_s(self) -> float:
        """The rate; 0 before enough was seen."""
        return self._xx / self._xy if self._steps >= _STEPS_MIN else 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A step took so long. One that a clock saw take no time is passed over."""
        if tokens <= 0 or seconds <= 0:
            return
        if self._xx:
            seconds = min(seconds, _SLOWNESS_MAX * tokens * self._xy / self._xx)
        self._steps += 1
        self._largest = max(self._largest, tokens)
        fading = _FADING ** (tokens / self._largest)
        self._xx = fading * self._xx + tokens * tokens
        self._xy = fading * self._xy + tokens * seconds


class PrefillMeter:
    """Measures steps, which end in the order in which they began. One may begin before the one before it is over.

    Attributes:
        rate: what came of it.
    """

    def __init__(self) -> None:
        self.rate = PrefillRate()
        self._under_way: deque[tuple[float, int]] = deque(maxlen=_STEPS_UNDER_WAY_MAX)
        self._over_s = 0.0

    def begin(self, now_s: float, tokens: int) -> None:
        """A step is on its way, with so many tokens of prompts; 0 = its time says nothing of them."""
        self._under_way.append((now_s, tokens))

    def end(self, now_s: float) -> None:
        """The output of the oldest step is here. It was computed since it began and the one before it was over."""
        if self._under_way:
            began_s, tokens = self._under_way.popleft()
            self.rate.observe(tokens, now_s - max(began_s, self._over_s))
            self._over_s = now_s


def prompt_tokens(step: Step, by_id: Mapping[str, Tracked]) -> int:
    """Tokens of prompts that a step computes; 0 where it computes more of other ones, which take their own time."""
    scheduled = step.num_scheduled_tokens
    total = sum(scheduled.values())
    if total == len(scheduled):
        return 0  # one for each request: no loop over them, for such are nearly all steps
    cached = step.scheduled_cached_reqs
    requests = itertools.chain(
        ((new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs),
        zip(cached.req_ids, cached.num_computed_tokens, strict=True),
    )
    tokens = sum(
        max(min(by_id[name].request.num_prompt_tokens - computed, scheduled[name]), 0)
        for name, computed in requests
        if name in by_id
    )
    return tokens if 2 * tokens >= total else 0
