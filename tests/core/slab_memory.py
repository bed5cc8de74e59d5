"""The host pool's bytes for models: slabs of a few units, in which blocks of several sizes lie over one another.

A block of a namespace with n slots in a slab covers ``UNITS / n`` units of it. What is written in one size is torn when
it is read in another, as in real memory. Who was handed slots holds their units until it gives them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping

#: Of a slab: divisible by every number of slots in a slab that models use.
UNITS = 24
Content = object


class SlabMemory:
    """Contents of every unit on every shard, and who holds units.

    Args:
        shards: with a memory each.
        units: of a slab; divisible by every number of slots in a slab that is used.
    """

    def __init__(self, shards: int, units: int = UNITS) -> None:
        self.shards = shards
        self._slab_units = units
        self._units: list[dict[int, Content]] = [{} for _ in range(shards)]
        self._holders: dict[int, dict[object, bool]] = {}  #: unit -> who holds it, and whether to write

    def read(self, shard: int, per_slab: int, slot: int) -> Content:
        """What a slot contains; a tuple of all its parts where they differ."""
        parts = [self._units[shard].get(unit) for unit in self._units_of(per_slab, slot)]
        return parts[0] if all(part == parts[0] for part in parts) else ("torn", *parts)

    def write(self, shard: int, per_slab: int, slot: int, content: Content) -> None:
        """Fill a slot."""
        self._units[shard].update(dict.fromkeys(self._units_of(per_slab, slot), content))

    def hold(self, holder: object, per_slab: int, slots: Iterable[int], *, writes: bool) -> None:
        """Slots are handed to somebody: nobody else may have them, unless all only read."""
        for slot in slots:
            for unit in self._units_of(per_slab, slot):
                holders = self._holders.setdefault(unit, {})
                assert not holders or not (writes or any(holders.values())), f"slot {slot} was handed to {holders}, too"
                holders[holder] = writes

    def give_back(self, holder: object) -> None:
        """Somebody touches its slots no more."""
        for holders in self._holders.values():
            holders.pop(holder, None)

    @property
    def held_units(self) -> int:
        """Units that somebody holds."""
        return sum(bool(holders) for holders in self._holders.values())

    def _units_of(self, per_slab: int, slot: int) -> range:
        """The units that a slot covers."""
        slab, place = divmod(slot, per_slab)
        size = self._slab_units // per_slab
        first = slab * self._slab_units + place * size
        return range(first, first + size)


class SlotView(MutableMapping[int, Content]):
    """The slots of one size on one shard, as a mapping from slot to content."""

    def __init__(self, memory: SlabMemory, shard: int, per_slab: int) -> None:
        self._memory, self._shard, self._per_slab = memory, shard, per_slab

    def __getitem__(self, slot: int) -> Content:
        return self._memory.read(self._shard, self._per_slab, slot)

    def __setitem__(self, slot: int, content: Content) -> None:
        self._memory.write(self._shard, self._per_slab, slot, content)

    def __delitem__(self, slot: int) -> None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError
