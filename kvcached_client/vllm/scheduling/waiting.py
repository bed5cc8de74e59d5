"""How long vLLM's scheduler waits for the daemon's replies before it tells vLLM to ask again.

Asking again costs vLLM a whole step, and a step that computes nothing takes processor time from the daemon and its
thread. A short wait is therefore cheaper if the reply comes soon:

* All waits of one scheduler step together take no more than `WAIT_S_PER_STEP_MAX`.
* While vLLM has other work, the scheduler waits a few times as long as the daemon typically takes, and not at all if
  the daemon typically takes longer than the limit. After a wait without an event, the scheduler does not wait again
  until an event has come.
* After a step that computed nothing, a wait delays no other request, so it may take the whole limit.
* Without a session, and after a missed deadline of the daemon, there is no wait.

This module also measures how fast vLLM computes prompts, which the daemon compares with a fetch from storage.
The measurement is taken in the scheduler, so it includes everything that a prompt waits for, on every device. Loads of
kvcached never block a step, so it does not include them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from kvcached_client.vllm.daemon.inbox import LinkPort
from kvcached_client.vllm.scheduling.request_state import RequestState, Step

#: A small part of a step of a large model, and many times the time of a reply on an idle machine.
WAIT_S_PER_STEP_MAX: Final = 0.003
#: The wait while vLLM has other work, in multiples of the typical time of a reply. On an idle machine, nearly all
#: replies come within it.
_TYPICAL_ANSWERS: Final = 4


class Patience:
    """Decides how long one scheduler waits.

    Args:
        link: to the daemon's thread.
        clock: returns seconds.
    """

    def __init__(self, link: LinkPort, clock: Callable[[], float]) -> None:
        self._link = link
        self._clock = clock
        self._left_s = WAIT_S_PER_STEP_MAX
        self._is_idle = False
        self._was_in_vain = False

    def begin_step(self, *, is_idle: bool) -> None:
        """Note the begin of a scheduler step; `is_idle`: the last step computed nothing."""
        self._left_s = WAIT_S_PER_STEP_MAX
        self._is_idle = is_idle

    def heard(self) -> None:
        """Note that events have come."""
        self._was_in_vain = False

    def wait(self, *, is_fetching: bool) -> bool:
        """Wait for an event; returns whether there is one. `is_fetching`: the reply waits for storage."""
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


#: Factor of the weight of all steps when a step of the largest size so far comes; smaller steps reduce it less.
_FADING: Final = 0.9
#: Upper bound of a step's time, in multiples of the expected time: a longer step was stopped for another reason, or is
#: small and says little about long prompts.
_SLOWNESS_MAX: Final = 4.0
#: Number of steps before there is a rate: the first steps may warm up or compile.
_STEPS_MIN: Final = 4
#: Upper bound of vLLM's steps in flight. There is one, or two with asynchronous scheduling.
_STEPS_UNDER_WAY_MAX: Final = 16


class PrefillRate:
    """Seconds = tokens / rate: a least-squares line through the origin in which old steps fade.

    Large steps count most, because tokens are squared. A small step takes nearly as long as a large one, so its rate is
    far below the rate of a long prompt, whose steps are full.
    """

    def __init__(self) -> None:
        self._steps = self._largest = 0
        self._xx = self._xy = 0.0  #: sums of tokens * tokens, and of tokens * seconds

    @property
    def tokens_per_s(self) -> float:
        """The rate; 0 before enough steps were measured."""
        return self._xx / self._xy if self._steps >= _STEPS_MIN else 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Count the tokens and the time of a step. A step that took no time by the clock is ignored."""
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
    """Measures steps, which end in the order in which they began. A step may begin before the last one has ended.

    Attributes:
        rate: the measured rate.
    """

    def __init__(self) -> None:
        self.rate = PrefillRate()
        self._under_way: deque[tuple[float, int]] = deque(maxlen=_STEPS_UNDER_WAY_MAX)
        self._over_s = 0.0

    def begin(self, now_s: float, tokens: int) -> None:
        """Note the begin of a step with `tokens` tokens of prompts; 0 = do not measure it."""
        self._under_way.append((now_s, tokens))

    def end(self, now_s: float) -> None:
        """Note the end of the oldest step in flight. Its time starts when it began and the step before it had ended."""
        if self._under_way:
            began_s, tokens = self._under_way.popleft()
            self.rate.observe(tokens, now_s - max(began_s, self._over_s))
            self._over_s = now_s


def prompt_tokens(step: Step, by_id: Mapping[str, RequestState]) -> int:
    """Tokens of prompts that a step computes; 0 if it computes more other tokens, whose time is not that of prompts."""
    scheduled = step.num_scheduled_tokens
    total = sum(scheduled.values())
    if total == len(scheduled):
        return 0  # one token for each request, as in nearly all steps: no loop
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
