"""Which steps a worker reports as computed."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from kvcached_client.errors import DeviceError
from kvcached_client.types import FenceSequence
from kvcached_client.vllm.computed_steps import NEVER, ComputedSteps


class Fences:
    """A device that is done with steps when the test says so, until it fails."""

    def __init__(self) -> None:
        self.streams: deque[int] = deque()
        self.done = 0
        self.has_failed = False

    def next(self, stream: int) -> FenceSequence:
        self._check()
        self.streams.append(stream)
        return FenceSequence(len(self.streams))

    def signalled(self) -> FenceSequence:
        self._check()
        return FenceSequence(self.done)

    def _check(self) -> None:
        if self.has_failed:
            raise DeviceError("it has failed")


@pytest.fixture
def fences() -> Fences:
    return Fences()


def steps_behind(fences: Fences) -> ComputedSteps:
    given: Any = fences
    return ComputedSteps(given, lambda: 7)


def test_step_on_the_cpu_is_computed_when_it_is_launched() -> None:
    """Each step is reported once, with the step itself."""
    steps = ComputedSteps()
    assert steps.take() is None
    for number in (1, 2):
        steps.launched(number)
        assert steps.take() == number
        assert steps.take() is None


def test_step_on_a_device_is_reported_when_its_stream_is_done(fences: Fences) -> None:
    """The last of the steps that are done is reported, at the next look after that, and once."""
    steps = steps_behind(fences)
    for number in (4, 5, 6):
        steps.launched(number)
        assert steps.take() is None
    fences.done = 2
    assert [steps.take(), steps.take()] == [5, None]
    fences.done = 3
    assert [steps.take(), steps.take()] == [6, None]
    assert set(fences.streams) == {7}


@pytest.mark.parametrize("when", ["launch", "look"])
def test_device_that_fails_is_reported_once(fences: Fences, when: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody will know what was under way; no step is reported after that."""
    steps = steps_behind(fences)
    steps.launched(1)
    fences.has_failed = True
    if when == "launch":
        steps.launched(2)
    assert [steps.take(), steps.take()] == [NEVER, None]
    steps.launched(3)
    assert steps.take() is None
    assert caplog.text.count("it has failed") == 1
