"""Which generation each namespace is in."""

from __future__ import annotations

from kvcached.core.generations import EDITIONS_MAX, RANDOM_BITS, Edition, Generations

ROOT, OTHER = b"r" * 32, b"o" * 32


def test_known_namespace_goes_on_and_an_unknown_one_begins_anew() -> None:
    """A namespace that was written down has its generation; one that was not has a number of this life."""
    generations = Generations(100, {ROOT: Edition(7, "step 9")})

    assert (generations.of(ROOT), generations.of(OTHER)) == (7, 100)
    assert generations.editions == {ROOT: Edition(7, "step 9"), OTHER: Edition(100)}
    assert (generations.of(OTHER), generations.version) == (100, 1)


def test_no_number_is_given_twice() -> None:
    """Cleared namespaces, new ones and those of replicas never share a number in one life, nor with earlier lives."""
    generations = Generations(100, {ROOT: Edition(7)})
    given = [generations.renew(ROOT), generations.of(OTHER), generations.fresh(3), generations.renew(OTHER)]

    assert given == [100, 101, 102, 103]


def test_number_of_another_daemon_is_left_behind() -> None:
    """A clear after one of another daemon, or of a life whose clock was ahead, has a number that this one never gives.

    Both may count on from there, each without the other.
    """
    first, second = Generations(500 << RANDOM_BITS | 3), Generations(400 << RANDOM_BITS | 5, {ROOT: Edition(7)})
    shared = first.fresh(7)
    second.enter(ROOT, shared)
    numbers = {first.fresh(shared), first.fresh(shared + 1), second.renew(ROOT), second.renew(ROOT)}

    assert (len(numbers), min(numbers) > shared) == (4, True)


def test_weights_stay_through_a_clear() -> None:
    """A clear changes the generation only."""
    generations = Generations(100, {ROOT: Edition(7, "step 9")})
    generations.renew(ROOT)

    assert generations.editions[ROOT] == Edition(100, "step 9")


def test_root_that_tells_the_generation_is_replaced() -> None:
    """Nothing is left under the root that a replica's namespace had before."""
    generations = Generations(100, {ROOT: Edition(7)})
    generations.replace(ROOT, OTHER, Edition(100, "step 9"))

    assert (generations.editions, generations.version) == ({OTHER: Edition(100, "step 9")}, 1)


def test_namespaces_that_were_not_used_for_longest_are_forgotten() -> None:
    """Beyond the limit the one that was asked for least recently goes, and begins a generation nobody has used."""
    generations = Generations(100)
    roots = [number.to_bytes(32, "big") for number in range(EDITIONS_MAX + 1)]
    for root in roots[:-1]:
        generations.of(root)
    generations.of(roots[0])
    generations.of(roots[-1])

    assert (len(generations.editions), roots[0] in generations.editions) == (EDITIONS_MAX, True)
    assert generations.of(roots[1]) == 100 + EDITIONS_MAX + 1


def test_namespaces_in_use_are_never_forgotten() -> None:
    """A replica's namespace, which is asked for at the start only, is remembered beside any number of others."""
    generations = Generations(100, {ROOT: Edition(7)})
    generations.spare(lambda: {ROOT})
    for number in range(EDITIONS_MAX + 9):
        generations.of(number.to_bytes(32, "big"))

    assert (len(generations.editions), generations.of(ROOT)) == (EDITIONS_MAX, 7)
