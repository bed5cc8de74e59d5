"""The link: a session kept up in a thread of its own, and every question answered."""

from __future__ import annotations

import logging
import threading

import pytest

from kvcached_client.errors import KvcachedError
from kvcached_client.offload import Hold
from kvcached_client.types import LeaseId, TransferId
from kvcached_client.vllm.daemon import thread as link_module
from kvcached_client.vllm.daemon.commands import (
    Connected,
    DropLoad,
    DropStore,
    Found,
    Lost,
    NotFound,
    Planned,
    Release,
    Unplanned,
)
from kvcached_client.vllm.daemon.inbox import COMMANDS_MAX
from kvcached_client.vllm.daemon.thread import DaemonThread
from tests.vllm_connector.link_rig import (
    CLEARED,
    DRAINING,
    EXPIRED,
    GONE,
    LOAD,
    PAUSED,
    PLAN,
    REFUSED,
    SLOW,
    Rig,
    ScriptedClient,
    connected,
    offer,
    rig,
    seek,
)

__all__ = ["rig"]


def test_hit_brings_its_load(rig: Rig) -> None:
    """A seek acquires, prepares to load the whole hit at once, and is answered with both."""
    client = ScriptedClient(1, acquire=Hold(LeaseId(5), 2))
    connected(rig, client)
    assert rig.link.submit(seek())
    assert rig.wait(1) == [Found(1, 1, LeaseId(5), 2, LOAD)]
    assert client.calls == [("acquire", "r~1", bytes(32), 9, False), ("prepare_load", 5, 0, 2)]


def test_idle_link_notices_that_its_session_is_over(rig: Rig) -> None:
    """Without a command to carry out, the end of the session is noticed when it is told, and the next one is opened."""
    client = ScriptedClient(1)
    connected(rig, client, ScriptedClient(2))
    rig.link.submit(seek())
    rig.wait(1)

    client.is_alive = False
    rig.link.wake()

    lost, opened = rig.wait(2)
    assert lost == Lost(1)
    assert isinstance(opened, Connected)


def test_seek_for_storing_prepares_no_load(rig: Rig) -> None:
    """A seek for storing counts all blocks, and prepares nothing."""
    client = ScriptedClient(1, acquire=Hold(LeaseId(5), 2))
    connected(rig, client)
    rig.link.submit(seek(load=False))
    assert rig.wait(1) == [Found(1, 1, LeaseId(5), 2, None)]
    assert client.calls == [("acquire", "r~1", bytes(32), 9, True)]


@pytest.mark.parametrize("error", [REFUSED, CLEARED, PAUSED])
def test_load_that_is_refused_leaves_the_lease(rig: Rig, error: KvcachedError) -> None:
    """Where only the load is refused the session goes on, and the answer is a lease without load."""
    connected(rig, ScriptedClient(1, acquire=Hold(LeaseId(5), 2), prepare_load=error))
    rig.link.submit(seek())
    assert rig.wait(1) == [Found(1, 1, LeaseId(5), 2, None)]
    assert rig.link.submit(offer(2))
    assert rig.wait(1) == [Planned(2, PLAN)]


@pytest.mark.parametrize("error", [REFUSED, DRAINING])
def test_refusals_are_answers(rig: Rig, error: KvcachedError) -> None:
    """A refused seek or offer is answered, and the next ones are carried out in the same session."""
    connected(rig, ScriptedClient(1, acquire=[error, Hold(LeaseId(5), 0)], prepare_store=[error, PLAN]))
    for command in (seek(1), offer(2), seek(3), offer(4)):
        rig.link.submit(command)
    answers = sorted(rig.wait(4), key=lambda event: event.ticket)  # type: ignore[union-attr]
    assert answers == [NotFound(1), Unplanned(2), Found(3, 1, LeaseId(5), 0, None), Planned(4, PLAN)]


def test_commands_without_answer_are_carried_out_in_order(rig: Rig) -> None:
    """What is dropped and released is told to the daemon in the order of the commands."""
    client = ScriptedClient(1)
    connected(rig, client)
    for command in (
        DropLoad(1, TransferId(3)),
        DropStore(1, TransferId(4), "why"),
        Release(1, LeaseId(5)),
    ):
        rig.link.submit(command)
    client.await_calls(3)
    assert client.calls == [("cancel_load", 3), ("cancel_store", 4, "why"), ("release", 5)]


def test_seeks_go_before_what_no_request_waits_for(rig: Rig) -> None:
    """A seek that a request waits for is carried out before offers and releases that were submitted earlier."""
    client = ScriptedClient(1)
    connected(rig, client)
    client.go_on.clear()
    rig.link.submit(DropLoad(1, TransferId(1)))
    client.await_calls(1)
    for command in (Release(1, LeaseId(5)), offer(1), seek(2, load=False), seek(3)):
        rig.link.submit(command)
    client.go_on.set()
    rig.wait(3)
    assert [call[:2] for call in client.calls[1:2]] == [("acquire", "r~3")]


def test_questions_of_a_turn_are_sent_before_the_first_answer(rig: Rig) -> None:
    """Seeks and offers that wait together are all sent before the link waits for an answer."""
    client = ScriptedClient(1)
    connected(rig, client)
    client.go_on.clear()
    rig.link.submit(DropLoad(1, TransferId(1)))
    client.await_calls(1)
    for command in (seek(1), seek(2), offer(3)):
        rig.link.submit(command)
    sent: list[list[str]] = []
    finish = client._finish

    def note(name: str) -> object:
        sent.append([call[0] for call in client.calls])
        return finish(name)

    client._finish = note  # type: ignore[method-assign]
    client.go_on.set()
    rig.wait(3)
    assert sent[0] == ["cancel_load", "acquire", "acquire", "prepare_stores"]


def test_deadlines_missed_together_are_one_pause(rig: Rig) -> None:
    """Several seeks that were sent together and not answered in time make one pause, not one for each."""
    client = ScriptedClient(1, acquire=SLOW)
    connected(rig, client)
    client.go_on.clear()
    rig.link.submit(DropLoad(1, TransferId(1)))
    client.await_calls(1)
    for ticket in range(8):
        rig.link.submit(seek(ticket))
    client.go_on.set()
    rig.wait(8)
    assert rig.link._quiet_until == rig.now + link_module.PAUSE_S_MIN


def test_link_learns_how_long_answers_take(rig: Rig) -> None:
    """The typical answer follows the times that seeks took."""
    client = ScriptedClient(1)
    connected(rig, client)
    before = rig.link.answer_s
    finish = client._finish

    def slowly(name: str) -> object:
        rig.now += 0.1
        return finish(name)

    client._finish = slowly  # type: ignore[method-assign]
    for ticket in range(1, 40):
        rig.link.submit(seek(ticket))
        rig.wait(1)
    assert before < 0.001
    assert rig.link.answer_s > 0.003


def test_nothing_is_accepted_before_there_is_a_session(rig: Rig) -> None:
    """Without a session commands are turned away, and the daemon is tried again and again."""
    rig.start(GONE, REFUSED, SLOW)
    rig.await_tries(4)
    assert not rig.link.is_taking
    assert not rig.link.submit(seek())
    assert not rig.link.submit(Release(1, LeaseId(5)))
    assert rig.link.take() == []


def test_questions_are_limited(rig: Rig) -> None:
    """When too many commands wait, further questions are turned away, and what gives something back is not."""
    client = ScriptedClient(1)
    connected(rig, client)
    client.go_on.clear()
    rig.link.submit(seek(1))
    assert client.entered.wait(10)
    for ticket in range(2, COMMANDS_MAX + 2):
        assert rig.link.submit(seek(ticket))
    assert not rig.link.is_taking
    assert not rig.link.submit(seek(9999))
    assert rig.link.submit(Release(1, LeaseId(5)))
    client.go_on.set()
    assert len(rig.wait(COMMANDS_MAX + 1)) == COMMANDS_MAX + 1


@pytest.mark.parametrize("error", [GONE, EXPIRED])
def test_seek_on_a_dead_session_is_answered_by_the_next(rig: Rig, error: KvcachedError) -> None:
    """A seek that finds the session over is carried out on the next one, if that is to be had at once."""
    first = ScriptedClient(1, acquire=[Hold(LeaseId(4), 0), error])
    connected(rig, first, ScriptedClient(2, acquire=Hold(LeaseId(6), 0)))
    rig.link.submit(seek(1))
    rig.wait(1)
    rig.link.submit(seek(2))
    lost, event, found = rig.wait(3)
    assert (lost, found) == (Lost(1), Found(2, 2, LeaseId(6), 0, None))
    assert isinstance(event, Connected)
    assert event.note.number == 2
    assert first.calls[-1] == ("close",)


def test_heartbeats_end_a_session(rig: Rig) -> None:
    """A session that heartbeats found over, as after the engine was stopped, is not used for the next command."""
    first = ScriptedClient(1)
    connected(rig, first, ScriptedClient(2, acquire=Hold(LeaseId(6), 0)))
    rig.link.submit(seek(1))
    rig.wait(1)
    first.is_alive = False
    rig.link.submit(seek(2))
    assert [type(event) for event in rig.wait(3)] == [Lost, Connected, Found]
    assert [call[0] for call in first.calls] == ["acquire", "close"]


def test_dead_daemon_answers_all_that_waits(rig: Rig) -> None:
    """Where no other session is to be had, all that waits is answered with nothing, and then commands are refused."""
    client = ScriptedClient(1, acquire=[Hold(LeaseId(4), 0), GONE])
    connected(rig, client)
    rig.link.submit(seek(1))
    rig.wait(1)
    client.entered.clear()
    client.go_on.clear()
    rig.link.submit(seek(2))
    assert client.entered.wait(10)
    for command in (offer(3), seek(4), Release(1, LeaseId(5))):
        rig.link.submit(command)
    client.go_on.set()
    lost, *answers = rig.wait(4)
    assert lost == Lost(1)
    assert sorted(answers, key=lambda event: event.ticket) == [NotFound(2), Unplanned(3), NotFound(4)]  # type: ignore[union-attr]
    assert not rig.link.submit(seek(5))


def test_commands_of_a_lost_session_are_dropped(rig: Rig) -> None:
    """What was commanded for a session that is lost is not told to the next one; offers are answered."""
    first = ScriptedClient(1, acquire=[Hold(LeaseId(4), 0), EXPIRED])
    second = ScriptedClient(2)
    connected(rig, first, second)
    rig.link.submit(seek(1))
    rig.wait(1)
    first.entered.clear()
    first.go_on.clear()
    rig.link.submit(seek(2))
    assert first.entered.wait(10)
    for command in (Release(1, LeaseId(4)), DropLoad(1, TransferId(3)), DropStore(1, TransferId(3), ""), offer(3)):
        rig.link.submit(command)
    first.go_on.set()
    assert [type(event) for event in rig.wait(4)] == [Lost, Connected, Found, Unplanned]
    assert [call[0] for call in second.calls] == ["acquire"]


def test_sessions_that_die_at_once_are_paused_between(rig: Rig) -> None:
    """A session that worked for nothing is followed by a pause: a seek is not passed on and on."""
    connected(rig, *(ScriptedClient(number, acquire=GONE) for number in range(1, 4)))
    rig.link.submit(seek(1))
    *before, after = rig.wait(3)  # the pause may be over before this thread runs again
    assert before == [Lost(1), NotFound(1)]
    assert isinstance(after, Connected)


def test_slow_daemon_keeps_its_session(rig: Rig) -> None:
    """A missed deadline answers what waits, and no question is accepted for a while; the session goes on after it."""
    client = ScriptedClient(1, acquire=[SLOW, Hold(LeaseId(6), 0)])
    connected(rig, client)
    client.go_on.clear()
    rig.link.submit(seek(1))
    assert client.entered.wait(10)
    rig.link.submit(seek(2))
    rig.link.submit(Release(1, LeaseId(5)))
    rig.link.submit(offer(3))
    client.go_on.set()
    answers = sorted(rig.wait(3), key=lambda event: event.ticket)  # type: ignore[union-attr]
    assert answers == [NotFound(1, is_late=True), NotFound(2, is_late=True), Unplanned(3)]
    assert not rig.link.is_taking
    assert rig.link.submit(DropLoad(1, TransferId(3)))
    rig.now += 10
    assert rig.link.submit(seek(4))
    assert rig.wait(1) == [Found(4, 1, LeaseId(6), 0, None)]
    calls = sorted(call[0] for call in client.calls if call[0] != "settle")
    assert calls == ["acquire", "acquire", "cancel_load", "release"]


def test_idle_link_gives_back_what_came_too_late(rig: Rig) -> None:
    """After a missed deadline and a pause, what was granted too late is given back, though nobody asks for anything."""
    client = ScriptedClient(1, acquire=SLOW, settle=[SLOW, None])
    connected(rig, client)
    rig.link.submit(seek())
    assert rig.wait(1) == [NotFound(1, is_late=True)]
    client.await_calls(3)
    assert client.calls[1:] == [("settle",), ("settle",)]
    rig.now += 10
    rig.link.submit(offer(2))
    assert rig.wait(1) == [Planned(2, PLAN)]
    assert client.calls[3][0] == "prepare_stores"


def test_clear(rig: Rig) -> None:
    """A clear is made at once, and waited for."""
    client = ScriptedClient(1)
    connected(rig, client)
    assert rig.link.clear(10)
    assert client.calls == [("clear",)]


def test_clear_without_session_is_owed(rig: Rig) -> None:
    """A clear without a session did not happen; it is made before the next session's first seek."""
    rig.start(GONE)
    rig.await_tries(2)
    assert not rig.link.clear(10)
    client = ScriptedClient(1)
    rig.sessions = [client]
    rig.wait(1)
    rig.link.submit(seek(1))
    rig.wait(1)
    assert [call[0] for call in client.calls] == ["clear", "acquire"]


def test_clear_that_fails_is_owed(rig: Rig) -> None:
    """While a clear is owed and cannot be made nothing is found: what is stored may be out of date."""
    client = ScriptedClient(1, clear=[REFUSED, REFUSED, 3])
    connected(rig, client)
    assert not rig.link.clear(0.01)
    rig.link.submit(seek(1))
    assert rig.wait(1) == [NotFound(1)]
    rig.link.submit(seek(2))
    assert rig.wait(1) == [Found(2, 1, LeaseId(5), 0, None)]
    assert [call[0] for call in client.calls] == ["clear", "clear", "clear", "acquire"]


def test_close_ends_thread_and_session(rig: Rig) -> None:
    """Closing says goodbye, answers what waits and ends the thread; again it does nothing."""
    client = ScriptedClient(1)
    connected(rig, client)
    client.go_on.clear()
    rig.link.submit(seek(1))
    assert client.entered.wait(10)
    rig.link.submit(seek(2))
    closing = threading.Thread(target=rig.link.close)
    closing.start()
    with rig.link._changed:
        assert rig.link._changed.wait_for(lambda: rig.link._is_closing, 10)
    client.go_on.set()
    closing.join(10)
    assert rig.link.take() == [Found(1, 1, LeaseId(5), 0, None), NotFound(2)]
    assert client.calls[-1] == ("close",)
    rig.link.close()
    assert not rig.link.submit(seek(3))


def test_close_during_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that pauses between two tries ends without waiting for the end of the pause."""
    monkeypatch.setattr(link_module, "PAUSE_S_MIN", 1000.0)
    monkeypatch.setattr(link_module, "PAUSE_S_MAX", 1000.0)
    rig = Rig()
    rig.start(GONE)
    rig.await_tries(1)
    rig.link.close()
    assert rig.link._thread is not None
    assert not rig.link._thread.is_alive()


def test_close_before_start() -> None:
    """A link that was never started can be closed."""
    DaemonThread().close()


def test_fault_in_the_thread_answers_what_waits(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """A fault of kvcached ends the link, not vLLM: it is logged, what waits is answered, and nothing more accepted."""
    client = ScriptedClient(1)
    connected(rig, client)
    client.begin_prepare_stores = broken  # type: ignore[assignment]
    client.go_on.clear()
    rig.link.submit(seek(1))
    assert client.entered.wait(10)
    rig.link.submit(Release(1, LeaseId(5)))
    rig.link.submit(offer(2))
    client.go_on.set()
    assert rig.wait(2) == [Found(1, 1, LeaseId(5), 0, None), Unplanned(2)]
    assert rig.link._thread is not None
    rig.link._thread.join(10)
    assert not rig.link.submit(seek(3))
    assert "internal error, the connection to the daemon is closed" in caplog.text


def broken(*_: object) -> None:
    raise ZeroDivisionError


def test_pauses_grow() -> None:
    """Pauses double from 0.2 s to 5 s."""
    pauses, pause = [], 0.0
    for _ in range(7):
        pause = link_module._longer(pause)
        pauses.append(round(pause, 3))
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_end_of_a_session_warns_only_where_no_other_follows(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """VLLM's clean stop ends the session before the link closes: that is no warning. That there is no daemon is one."""
    caplog.set_level(logging.INFO, logger="vllm.kvcached")
    client = ScriptedClient(1)
    connected(rig, client, ScriptedClient(2))
    rig.link.submit(seek())
    rig.wait(1)
    client.is_alive = False
    rig.link.wake()
    rig.wait(2)
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3

    assert rig.link._client is not None
    rig.link._client.is_alive = False  # type: ignore[misc]
    rig.link.wake()
    rig.await_tries(3)
    rig.link.close()
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "no session" in warnings[0]
