"""How long vLLM's scheduler is in its connector, step by step, timed from outside."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from time import perf_counter_ns
from typing import Any, Final, TextIO

#: The hook with which vLLM says what it has decided for a step, and the last one that it calls for it.
_STEP_HOOK: Final = "build_connector_meta"
_LAST_HOOK: Final = "take_events"


class HookClock:
    """Times every public method of the scheduler's connector; a call from one to another counts once.

    What vLLM calls between two steps counts for the second one.

    Args:
        connector: vLLM's, in its scheduler.
        lines: get one for each step, as JSON, when it is over.
    """

    def __init__(self, connector: Any, lines: TextIO) -> None:  # noqa: ANN401 - of whatever version of vLLM
        self._lines = lines
        self._depth = 0
        self._spent_ns = 0
        self._step: Any = None
        for name in dir(type(connector)):
            if name.startswith("_") or isinstance(getattr(type(connector), name), property):
                continue
            hook = getattr(connector, name)
            if callable(hook):
                setattr(connector, name, self._timed(name, hook))

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def timed(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - any hook's
            if name == _STEP_HOOK:
                self._step = arguments[0]
            self._depth += 1
            start = perf_counter_ns()
            try:
                return hook(*arguments, **options)
            finally:
                spent_ns = perf_counter_ns() - start
                self._depth -= 1
                if not self._depth:
                    self._spent_ns += spent_ns
                    if name == _LAST_HOOK:
                        self._end_step()

        return timed

    def _end_step(self) -> None:
        step, self._step = self._step, None
        spent_ns, self._spent_ns = self._spent_ns, 0
        if step is not None:
            admits = bool(step.scheduled_new_reqs or step.scheduled_cached_reqs.resumed_req_ids)
            line = {"running": len(step.num_scheduled_tokens), "admits": admits, "spent_ns": spent_ns}
            self._lines.write(json.dumps(line) + "\n")
