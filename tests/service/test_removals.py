"""The verb forget, from a request to what has left memory and storage, and to the one answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcached.core.messages import TransferKind
from kvcached.core.slots.ranges import every_slot
from kvcached.core.slots.states import SlotState
from kvcached.memory.host_pool import HostHeaders, create_host_memory
from kvcached.recovery.scan import scan
from kvcached.service.pending import WAITING_MAX, Answer, Wait
from kvcached.storage.forgets import DELETE_BLOCKS_MAX
from kvcached.storage.link_state import LinkState
from kvcached.storage.messages import Delete, Done
from kvcached_client.blocks import header as host_header
from kvcached_client.blocks.header import BlockName, HeaderKind
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import engine as wire
from kvcached_client.types import MissReason
from tests.core.tier_world import keys_in, solid_slots
from tests.service.office import EPOCH, ONE, SLAB_BYTES, TWO, FakePeer, Office, key_chain
from tests.service.offload_office import OffloadOffice
from tests.service.test_storage_verbs import StorageOffice

BLOCKS = 4


def ask(
    office: Office, target: str, keys: bytes, from_block: int = 0, *, deadline_ms: int = 1000
) -> list[wire.PrefixForgotten]:
    """The answers to a request; the list grows when they come."""
    told: list[wire.PrefixForgotten] = []

    def note(answer: Answer) -> None:
        assert isinstance(answer.header, wire.PrefixForgotten), answer.header
        assert answer.header.id == request.id
        told.append(answer.header)

    request = wire.ForgetPrefix(id=office.next_id(), target=target, from_block=from_block, deadline_ms=deadline_ms)
    office.service.submit(b"people", request, [keys], note)
    return told


def said(told: list[wire.PrefixForgotten]) -> tuple[int, int, int, int, str]:
    """What the one answer says: copies on devices and in the host pool, blocks in storage, those in use, and why."""
    (each,) = told
    return each.device, each.host, each.stored, each.in_use, each.left_in_storage


def release(office: Office, lease: int) -> None:
    office.expect(wire.Released, wire.Release(id=office.next_id(), epoch=EPOCH, lease=lease))


def cache(office: OffloadOffice, welcome: wire.WelcomeOffload, blocks: int, seed: int = 0) -> None:
    """An engine in offload mode computes a prompt, stores and releases it."""
    held = office.acquire_blocks(blocks, seed=seed, request=f"seed {seed}")
    plan = office.expect(wire.StorePrepared, office.prepare_store(held.lease), key_chain(blocks, seed))
    for shard in range(2):
        office.expect(wire.Settled, office.transfer_done(welcome, plan.transfer, shard))
    release(office, held.lease)


@pytest.fixture
def office() -> StorageOffice:
    """An engine in offload mode with a prompt in the host pool, above storage."""
    made = StorageOffice()
    cache(made, made.welcome, BLOCKS)
    return made


def deletion(office: StorageOffice) -> Delete:
    """The last request to storage."""
    request, _ = office.link.asked[-1]
    assert isinstance(request, Delete)
    return request


def answer(office: StorageOffice, count: int = 0, error: str = "") -> None:
    """Storage is through with its last request."""
    request, tell = office.link.asked[-1]
    tell(Done(sequence=request.sequence, count=count, failed=bool(error), error=error))


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["a", "b", "6e6e6e6e"])
def test_prompt_leaves_the_pools_of_all_replicas_and_the_host_pool(target: str) -> None:
    """Whichever of them is named; without storage the answer comes at once."""
    office = Office("a", "b", host_slabs=2)
    office.enter(FakePeer(1))
    office.store(key_chain(BLOCKS))
    office.workers["a"].end_all()
    office.enter(FakePeer(2), "b", peer=TWO)
    office.store(key_chain(1, seed=9), peer=TWO)
    office.workers["b"].end_all()

    assert said(ask(office, target, key_chain(BLOCKS), 1)) == (BLOCKS - 1, BLOCKS - 1, 0, 0, "")
    assert [office.count(name, SlotState.CACHED) for name in "ab"] == [1, 1]
    explain = wire.Explain(id=office.next_id(), tokens=4 * BLOCKS, full=True, replica="a")
    (told,) = office.expect(wire.Explained, explain, key_chain(BLOCKS), peer=TWO).explanations
    assert (told.hit, told.reason) == (1, MissReason.FORGOTTEN)


def test_request_that_holds_the_prompt_goes_on() -> None:
    """Its blocks are counted, and leave at the next call after its release."""
    office = Office("a", host_slabs=2)
    office.enter(FakePeer(1))
    office.store(key_chain(BLOCKS))
    office.workers["a"].end_all()
    held = office.expect(wire.Acquired, office.acquire(key_chain(BLOCKS)), key_chain(BLOCKS))
    assert said(ask(office, "a", key_chain(BLOCKS))) == (0, BLOCKS, 0, BLOCKS, "")

    release(office, held.lease)
    office.workers["a"].end_all()
    assert said(ask(office, "a", key_chain(BLOCKS)))[3] == 0
    assert office.count("a", SlotState.CACHED) == 0


@pytest.fixture
def headers() -> Iterator[HostHeaders]:
    """Those of the host pool of an `OffloadOffice`."""
    memory = create_host_memory(4, SLAB_BYTES)
    yield HostHeaders(memory)
    memory.close()


class Shards:
    """What the processes of an engine write beside the host slots, and what the next daemon would find there."""

    def __init__(self, office: OffloadOffice, welcome: wire.WelcomeOffload, headers: HostHeaders) -> None:
        self._headers = headers
        self._geometry = office.service._offload_admission.geometry(welcome.namespace)
        self._kind = HeaderKind(welcome.namespace[:16], b"f" * 16, welcome.generation)
        (self._tree,) = office.cache.offload.namespaces.trees

    def write(self, keys: bytes, slots: list[int]) -> None:
        """Complete headers of a prompt's blocks."""
        chain = keys_in(keys)
        for depth, (key, slot) in enumerate(zip(chain, slots, strict=True)):
            name = BlockName(key, chain[depth - 1] if depth else b"", depth)
            for shard in range(2):
                place = self._geometry.header_offset(slot, shard)
                packed = host_header.pack(self._kind, name, bytes(16), EPOCH, 1)
                host_header.write(self._headers._mapped.cast("B")[place : place + len(packed)], packed)

    def found(self) -> int:
        """How many blocks."""
        assert self._tree.host is not None
        return len(scan(self._headers.table, self._geometry, self._kind, self._tree.host.slabs))


def test_next_daemon_does_not_find_what_was_removed(headers: HostHeaders) -> None:
    """The headers of its slots are no headers any more, also of a slot that was evicted before; others stay."""
    office = OffloadOffice(headers=headers)
    welcome = office.attach(FakePeer(1))
    shards = Shards(office, welcome, headers)
    (tree,) = office.cache.offload.namespaces.trees

    def store(blocks: int, seed: int) -> None:
        cache(office, welcome, blocks, seed)
        slots = {key: slot for run in tree.runs() for key, slot in solid_slots(run, -1).items()}
        keys = key_chain(blocks, seed)
        shards.write(keys, [slots[key] for key in keys_in(keys)])

    store(3, 1)
    everything = office.acquire_blocks(3, seed=1, request="all of it")
    store(BLOCKS, 2)
    tree.shed_host("evicted before")
    held = office.acquire_blocks(2, seed=1)
    release(office, everything.lease)
    assert shards.found() == BLOCKS + 3

    assert said(ask(office, "tiny", key_chain(BLOCKS, 2)))[:2] == (0, 0)
    assert shards.found() == 3
    assert said(ask(office, "tiny", key_chain(3, 1))) == (0, 1, 0, 2, "")
    assert shards.found() == 2
    release(office, held.lease)
    assert said(ask(office, "tiny", key_chain(3, 1))) == (0, 2, 0, 0, "")
    assert shards.found() == 0


@pytest.mark.parametrize("is_written_later", [False, True])
def test_next_daemon_does_not_find_what_was_removed_before_its_store_was_reported(
    headers: HostHeaders, *, is_written_later: bool
) -> None:
    """Nor what a process of an expired session writes after the removal: when all are dead its headers go, too."""
    office = OffloadOffice(headers=headers)
    process = FakePeer(1)
    welcome = office.attach(process)
    shards, keys = Shards(office, welcome, headers), key_chain(3, 1)
    plan = office.storing(3, seed=1)
    slots = [slot for (copy,) in [office.cache.offload.transfers] for slot in every_slot(copy.host)]
    shards.write(keys, slots)
    office.let_expire()
    assert (plan.depth, shards.found(), office.host_states()["quarantined"]) == (3, 3, 3)

    assert said(ask(office, "tiny", keys)) == (0, 0, 0, 0, "")
    assert shards.found() == 0
    if is_written_later:
        shards.write(keys, slots)
    office.die(process)
    assert (shards.found(), office.host_states()) == (0, {"free": 8})


# --- storage --------------------------------------------------------------------------------------------------------


def test_answer_waits_for_storage(office: StorageOffice) -> None:
    """Storage gets the keys of the prompt behind what stays, with the prefix of the namespace; its count is told."""
    told = ask(office, "tiny", key_chain(BLOCKS + 2), 1)
    request = deletion(office)
    assert (told, request.keys) == ([], key_chain(BLOCKS + 2)[16:])
    assert request.prefix == office.service.storage.format_of(office.welcome.namespace, 0).stored().prefix()  # type: ignore[union-attr]

    answer(office, 5)
    assert said(told) == (0, BLOCKS - 1, 5, 0, "")
    assert office.hit(BLOCKS) == 1


def test_deletion_of_many_blocks_is_in_parts(office: StorageOffice) -> None:
    """One request after the other, so that others have their turn; what went well until one fails is told."""
    blocks = 2 * DELETE_BLOCKS_MAX + 1
    for error in ("", "EIO"):
        office.link.asked.clear()
        told = ask(office, "tiny", key_chain(blocks), deadline_ms=1000)
        parts = [deletion(office).keys]
        while len(parts) < 3:
            answer(office, 7)
            parts.append(deletion(office).keys)
        assert (told, len(office.link.asked), b"".join(parts)) == ([], 3, key_chain(blocks))
        answer(office, 7 * (not error), error)
        assert said(told)[2:] == ((14, 0, "it failed: EIO") if error else (21, 0, ""))


def test_storage_that_does_not_delete_says_so(office: StorageOffice) -> None:
    """Nothing finds out by itself that the blocks are still there: the answer says it."""
    told = ask(office, "tiny", key_chain(BLOCKS))
    answer(office, -1)

    assert said(told) == (0, BLOCKS, 0, 0, "it deletes no blocks, and drops them when it wants")


@pytest.mark.parametrize("state", [each for each in LinkState if each is not LinkState.READY])
def test_storage_that_is_away_is_not_waited_for(office: StorageOffice, state: LinkState) -> None:
    """Memory is without the prompt; storage may have it, and the answer says so at once."""
    office.link.state, office.link.why = state, "the disk is gone"

    assert said(ask(office, "tiny", key_chain(BLOCKS))) == (0, BLOCKS, 0, 0, f"it is {state}: the disk is gone")
    assert office.link.asked == []


def test_blocks_that_may_come_back_are_said_to_be_left(office: StorageOffice) -> None:
    """Storage has deleted them, and a write may arrive later."""
    told = ask(office, "tiny", key_chain(BLOCKS))
    request, tell = office.link.asked[-1]
    tell(Done(sequence=request.sequence, count=BLOCKS, error="a write is late"))

    assert said(told)[2:] == (BLOCKS, 0, "a write is late")


def test_storage_process_that_ends_before_its_turn_is_told(
    office: StorageOffice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that finds no process any more is answered as one that failed."""
    monkeypatch.setattr(office.link, "ask", lambda *_: False)

    assert said(ask(office, "tiny", key_chain(BLOCKS)))[4] == "it failed: its process has ended"


@pytest.mark.parametrize("deadline_ms", [0, 50])
def test_deadline_is_answered_and_the_deletion_goes_on(office: StorageOffice, deadline_ms: int) -> None:
    """What has left memory is told in time, once; what storage says later is nobody's answer."""
    told = ask(office, "tiny", key_chain(BLOCKS), deadline_ms=deadline_ms)
    for timer in office.timers:
        assert timer.delay_s == deadline_ms / 1000
        timer.ring()
    late = (0, BLOCKS, 0, 0, f"it has not answered within {deadline_ms} ms, and goes on")
    assert said(told) == late
    answer(office, BLOCKS)
    assert said(told) == late


def test_prefetch_under_way_is_in_use(office: StorageOffice) -> None:
    """Storage keeps what it is about to bring."""
    office.prefetch("best_effort", seed=5)
    told = ask(office, "tiny", key_chain(6, 5))
    assert (said(told), office.link.asked) == ((0, 0, 0, 6, ""), [])
    office.bring()
    assert office.hit(6, seed=5) == 6


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "blocks", "from_block", "code"),
    [
        ("a", 0, 0, ErrorCode.BAD_VALUE),
        ("a", 2, 2, ErrorCode.BAD_VALUE),
        ("a", 2, 9, ErrorCode.BAD_VALUE),
        ("nobody", 2, 0, ErrorCode.UNKNOWN_REPLICA),
    ],
)
def test_nothing_to_remove_is_refused(target: str, blocks: int, from_block: int, code: ErrorCode) -> None:
    """A prompt of no blocks, one that stays as a whole, and a namespace that is not there."""
    office = Office("a", host_slabs=2)
    office.enter(FakePeer(1))
    office.store(key_chain(2))

    request = wire.ForgetPrefix(id=office.next_id(), target=target, from_block=from_block)
    assert office.error(request, key_chain(blocks), peer=TWO) is code
    assert office.count("a", SlotState.CACHED) == 2


def test_namespace_that_is_being_cleared_is_refused() -> None:
    """All of it goes in a moment."""
    office = Office("a", host_slabs=2)
    office.enter(FakePeer(1))
    office.store(key_chain(2))
    assert office.workers["a"].under_way(TransferKind.STORE)
    office.ask_late(wire.ClearNamespace(id=office.next_id(), target="a"))

    request = wire.ForgetPrefix(id=office.next_id(), target="a")
    assert office.error(request, key_chain(2), peer=TWO) is ErrorCode.CLEARING


def test_more_than_may_wait_for_storage_are_refused(office: StorageOffice) -> None:
    """Each of the others is answered, and the refused one may be repeated."""
    told = [ask(office, "tiny", key_chain(1, seed)) for seed in range(WAITING_MAX[Wait.STORAGE])]
    request = wire.ForgetPrefix(id=office.next_id(), target="tiny")
    assert office.error(request, key_chain(BLOCKS), peer=ONE) is ErrorCode.LIMIT

    for each, tell in office.link.asked[:]:
        tell(Done(sequence=each.sequence))
    assert [len(each) for each in told] == [1] * len(told)
