"""Which generation of each namespace is the present one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple

#: Namespaces whose editions are remembered. Far more than there are at a time; one beyond that begins a new generation.
EDITIONS_MAX: Final = 1024
#: The first number of a life ends with so many random bits, so no two daemons begin with the same.
RANDOM_BITS: Final = 12


class Edition(NamedTuple):
    """What a namespace holds at present.

    Attributes:
        generation: another one after each clear.
        weights_version: as it was set; "" = what the configuration says.
    """

    generation: int
    weights_version: str = ""


class Generations:
    """The editions of all namespaces, by root: which generation each is in, a number that no two contents ever share.

    Storage keeps blocks for longer than the daemon, its memory and the machine's boot last. A number that was used
    before would bring back the blocks that were stored under it, which may be those of older weights. So the numbers of
    one life of the daemon begin where no earlier life has been (`first`), and only go up.

    Args:
        first: larger than any generation of an earlier life.
        editions: those of earlier lives.
        provisional: roots of editions that this life has begun, because none was known.

    Attributes:
        version: grows whenever an edition changes.
        provisional: roots of namespaces whose generation began because none was known, and that were not cleared since:
            nothing is lost where one that turns out to be recorded takes its place.
        inherited: roots whose edition is that of an earlier life. What was answered then was recorded then.
    """

    def __init__(
        self, first: int = 0, editions: Mapping[bytes, Edition] | None = None, provisional: Iterable[bytes] = ()
    ) -> None:
        self.version = 0
        self.provisional = set(provisional)
        self._in_use: Callable[[], Collection[bytes]] = tuple
        self._next = first
        self._chance = first % (1 << RANDOM_BITS)
        self._editions: dict[bytes, Edition] = dict(editions or {})
        self.inherited = set(self._editions)

    @property
    def editions(self) -> Mapping[bytes, Edition]:
        """All that are remembered; the one asked for last comes last."""
        return self._editions

    def spare(self, in_use: Callable[[], Collection[bytes]]) -> None:
        """Remember the editions of the namespaces whose roots `in_use` returns, however many others there are."""
        self._in_use = in_use

    def of(self, root: bytes) -> int:
        """The generation of a namespace; one that was not known, or whose record was lost, begins a new one."""
        edition = self._editions.get(root)
        if edition is None:
            generation = self.renew(root)
            self.provisional.add(root)
            return generation
        self._put(root, edition)
        return edition.generation

    def renew(self, root: bytes) -> int:
        """Begin a new generation of a namespace whose root stays the same."""
        return self.enter(root, self.fresh(self._editions.get(root, Edition(-1)).generation))

    def enter(self, root: bytes, generation: int) -> int:
        """A namespace whose root stays the same is of this generation from now on."""
        self.replace(root, root, self._editions.get(root, Edition(-1))._replace(generation=generation))
        return generation

    def replace(self, before: bytes, root: bytes, edition: Edition) -> None:
        """A namespace has another edition, and maybe another root: the roots of replicas tell the generation."""
        self._editions.pop(before, None)
        self.provisional -= {before, root}
        self.inherited -= {before, root}
        self._put(root, edition)
        self.version += 1

    def forget(self, roots: Iterable[bytes]) -> None:
        """Nobody else remembers these editions: nor does this daemon, where the namespaces are not in use."""
        kept = set(self._in_use())
        for root in roots:
            if root not in kept:
                self.leave(root)

    def leave(self, root: bytes) -> None:
        """A namespace will have another root in a moment: nobody is to go on with the edition of this one."""
        if self._editions.pop(root, None) is not None:
            self.version += 1

    def fresh(self, before: int) -> int:
        """A number for the generation after `before`, used by no namespace so far.

        Where `before` is of another daemon, which may count on from it, this one leaves room. No daemon begins with 0.
        """
        if before >= self._next:
            self._next = ((before >> RANDOM_BITS) + 1 << RANDOM_BITS) + self._chance if before else 1
        self._next += 1
        return self._next - 1

    def _put(self, root: bytes, edition: Edition) -> None:
        self._editions.pop(root, None)
        self._editions[root] = edition
        surplus = len(self._editions) - EDITIONS_MAX
        if surplus > 0:
            kept = {root, *self._in_use()}
            for each in [each for each in self._editions if each not in kept][:surplus]:
                del self._editions[each]
                self.provisional.discard(each)
                self.inherited.discard(each)
