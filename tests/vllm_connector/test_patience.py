"""How long the scheduler waits for answers instead of having vLLM ask again, and requests whose answer was late."""

from __future__ import annotations

import pytest

from kvcached_client.vllm.daemon.commands import Fetching, Found, NotFound, Seek
from kvcached_client.vllm.daemon.inbox import TypicalTime
from kvcached_client.vllm.scheduling.waiting import WAIT_S_PER_STEP_MAX
from tests.vllm_connector.rig import BLOCK, FakeRequest, Rig, running

ASK_AGAIN = (None, False)


def patient_rig(*, is_idle: bool) -> Rig:
    """A scheduler whose last step had something to compute, or not; a wait takes as long as it may."""
    rig = Rig()
    if is_idle:
        rig.idle()
    else:
        running(rig, "busy", BLOCK - 1)
    rig.link.during_wait = rig.pass_time
    return rig


def ask(rig: Rig, count: int) -> list[FakeRequest]:
    """Requests that have asked for their hits."""
    return [rig.arrive(f"r{number}", 2 * BLOCK + 1) for number in range(count)]


def test_answer_that_is_near_is_waited_for() -> None:
    """An answer that comes within the wait is used at once: vLLM is not told to ask again."""
    rig = patient_rig(is_idle=False)
    (request,) = ask(rig, 1)

    def answer(_: float) -> None:
        rig.found(0)

    rig.link.during_wait = answer
    assert rig.matched(request) == (0, False)
    assert len(rig.link.waits) == 1


@pytest.mark.parametrize("is_idle", [True, False])
def test_waits_of_one_step_are_bounded_together(is_idle: bool) -> None:
    """However many requests wait for their answers, a step waits no longer than the limit; the next one waits again."""
    rig = patient_rig(is_idle=is_idle)
    requests = ask(rig, 16)
    seeks = rig.link.taken(Seek)
    for number in range(2):
        before = rig.now
        assert [rig.matched(request) for request in requests[number:]] == [ASK_AGAIN] * (16 - number)
        assert 0 < rig.now - before <= WAIT_S_PER_STEP_MAX + 1e-9
        rig.link.events.append(NotFound(seeks[number].ticket))  # something is heard
        rig.idle()


def test_wait_in_vain_beside_other_work_is_not_repeated() -> None:
    """While the daemon says nothing, running requests are held up once; after its next word, again."""
    rig = patient_rig(is_idle=False)
    first, second = ask(rig, 2)
    busy = rig.arrive("other", BLOCK - 1)
    for _ in range(3):
        assert rig.matched(first) == ASK_AGAIN
        rig.start(busy, 0, 1)
    assert len(rig.link.waits) == 1
    seeks = rig.link.taken(Seek)
    rig.link.events.append(NotFound(seeks[0].ticket))
    assert rig.matched(second) == ASK_AGAIN
    assert len(rig.link.waits) == 2


def test_scheduler_without_work_waits_in_every_step() -> None:
    """Where no request can be computed, each step waits: vLLM would spin through empty ones."""
    rig = patient_rig(is_idle=True)
    (request,) = ask(rig, 1)
    for _ in range(3):
        assert rig.matched(request) == ASK_AGAIN
        rig.idle()
    assert rig.link.waits == [WAIT_S_PER_STEP_MAX] * 3


def test_slow_daemon_is_not_waited_for_beside_other_work() -> None:
    """A daemon that typically takes longer than the limit holds up no running request."""
    rig = patient_rig(is_idle=False)
    rig.link.answer_s = 2 * WAIT_S_PER_STEP_MAX
    (request,) = ask(rig, 1)
    assert rig.matched(request) == ASK_AGAIN
    assert rig.link.waits == []


def test_absent_daemon_is_not_waited_for() -> None:
    """Without a session, or after a missed deadline, a question that is still out is not waited for."""
    rig = patient_rig(is_idle=True)
    (request,) = ask(rig, 1)
    rig.link.is_taking = False
    assert rig.matched(request) == ASK_AGAIN
    assert rig.link.waits == []


def test_storage_is_not_waited_for_beside_other_work() -> None:
    """An answer that waits for storage holds up no running request."""
    rig = patient_rig(is_idle=False)
    (request,) = ask(rig, 1)
    rig.link.events.append(Fetching(rig.link.taken(Seek)[0].ticket, 1.0))
    assert rig.matched(request) == ASK_AGAIN
    assert rig.link.waits == []


def test_typical_time_is_a_median() -> None:
    """A few answers that take very long do not move the typical time far; half of them do."""
    typical = TypicalTime()
    for number in range(400):
        typical.observe(10.0 if number % 10 == 0 else 0.001)
    assert 0.0008 < typical.seconds < 0.0015
    for _ in range(100):
        typical.observe(10.0)
    assert typical.seconds > 0.1


def test_late_request_is_counted_once() -> None:
    """A request that is computed because the answer was late counts as late, once, however often vLLM asks."""
    rig = Rig()
    request = rig.arrive("r", 2 * BLOCK + 1)
    assert rig.matched(request) == ASK_AGAIN
    assert rig.side.take_late() == 0
    rig.now += 1.5
    assert [rig.matched(request) for _ in range(2)] == [(0, False), (0, False)]
    assert (rig.side.take_late(), rig.side.take_late()) == (1, 0)


def test_request_that_the_link_gave_up_on_is_late() -> None:
    """A request whose seek missed the daemon's deadline counts as late; one that was refused does not."""
    rig = Rig()
    late, refused = ask(rig, 2)
    seeks = rig.link.taken(Seek)
    rig.link.events += [NotFound(seeks[0].ticket, is_late=True), NotFound(seeks[1].ticket)]
    assert [rig.matched(late), rig.matched(refused)] == [(0, False), (0, False)]
    assert rig.side.take_late() == 1


def test_answer_in_time_is_not_late() -> None:
    """A request whose answer came in time does not count."""
    rig = Rig()
    request = rig.arrive("r", 2 * BLOCK + 1)
    assert isinstance(rig.found(0), Found)
    assert rig.matched(request) == (0, False)
    assert rig.side.take_late() == 0
