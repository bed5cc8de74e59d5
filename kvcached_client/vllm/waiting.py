"""How long vLLM's scheduler waits for the daemon's answers instead of telling vLLM to ask again.

To ask again costs vLLM a whole step. One that computes nothing keeps processors busy that the link and the daemon need
for the answer. So a short wait is cheaper where the answer is near, and none where it is not:

* All waits of one scheduler step together take no more than `WAIT_S_PER_STEP_MAX`.
* Beside other work the scheduler waits a few times as long as the daemon typically takes, and not at all where that is
  longer than the limit. After a wait in vain it does not wait again before the daemon has said something.
* After a step with nothing to compute nobody is held up by a wait, so it may take all of the limit.
* Without a session, and after a deadline that the daemon missed, there is no wait.

And how fast vLLM computes prompts, for the daemon to weigh a fetch from storage against. It is measured where vLLM
decides and hears of results, so it holds all that a prompt waits for, on every device. Loads of kvcached never block a
step: none of its time is theirs.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from kvcached_client.vllm.commands import LinkPort
from kvcached_client.vllm.request_state import RequestState, Step

#: A small part of a step of a large model, and many times what an answer takes on an idle machine.
WAIT_S_PER_STEP_MAX: Final = 0.003
#: Beside other work: so many times the typical answer, which nearly all answers keep to on an idle machine.
_TYPICAL_ANSWERS: Final = 4


class Patience:
    """Decides on the waits of one scheduler.

    Args:
        link: to the daemon.
        clock: in seconds.
    """

    def __init__(self, link: LinkPort, clock: Callable[[], float]) -> None:
        self._link = link
        self._clock = clock
        self._left_s = WAIT_S_PER_STEP_MAX
        self._is_idle = False
        self._was_in_vain = False

    def begin_step(self, *, is_idle: bool) -> None:
        """The next scheduler step begins; `is_idle`: the last one had nothing to compute."""
        self._left_s = WAIT_S_PER_STEP_MAX
        self._is_idle = is_idle

    def heard(self) -> None:
        """The daemon has said something."""
        self._was_in_vain = False

    def wait(self, *, is_fetching: bool) -> bool:
        """Wait for an event; whether there is one. `is_fetching`: the answer waits for storage, which takes long."""
        most_s = self._most_s(is_fetching=is_fetching)
        if most_s <= 0:
            return False
        began_s = self._clock()
        has_come = self._link.wait(most_s)
        self._left_s -= self._clock() - began_s
        self._was_in_vain = not has_come
        return has_come

    def _most_s(self, *, is_fetching: bool) -> float:
        if not self._link.is_taking:
            return 0.0
        if self._is_idle:
            return self._left_s
        typical_s = self._link.answer_s
        if is_fetching or self._was_in_vain or typical_s > WAIT_S_PER_STEP_MAX:
            return 0.0
        return min(self._left_s, _TYPICAL_ANSWERS * typical_s)


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


def prompt_tokens(step: Step, by_id: Mapping[str, RequestState]) -> int:
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
