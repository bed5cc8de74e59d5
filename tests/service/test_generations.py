"""Which generation a namespace starts in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec import UNSET, structs

from kvcached.config.replica import ReplicaConfig
from kvcached.config.schema import load_config
from kvcached.core.generations import Edition
from kvcached.recovery.generations import EditionRecord, Generation, Record, editions_of, first_of, generation_of
from kvcached.recovery.state_file import Ledger, NamespaceRecord, ReplicaRecord, boot_id
from kvcached_client.blocks.host_layout import CanonicalLayout

CONFIG = """
[[replica]]
name = "a"
model = "tiny"
revision = "{revision}"
slots = 4
[[replica.group]]
layers = 1
kv_heads = 1
head_dim = 8
v_head_dim = 8
dtype = "float32"
"""
#: The first generation of a life.
FIRST = 1000
ROOT = b"s" * 32


@pytest.fixture
def replica(tmp_path: Path) -> ReplicaConfig:
    return configured(tmp_path)


def configured(folder: Path, revision: str = "1") -> ReplicaConfig:
    path = folder / "kvcached.toml"
    path.write_text(CONFIG.format(revision=revision))
    (replica,) = load_config(path, environment={}).replica
    return replica


def ledger(*replicas: Generation, namespaces: Mapping[bytes, int] | None = None) -> Ledger:
    """What an earlier daemon wrote down."""
    return Ledger(
        boot=boot_id(),
        epoch=1,
        namespaces=tuple(
            NamespaceRecord(
                root=root.hex(), label="m", fingerprint="00", block_size=4, shards=1, block_bytes=1, slots_per_slab=1,
                generation=generation,
            )
            for root, generation in (namespaces or {}).items()
        ),
        replicas=tuple(
            ReplicaRecord(
                name="a",
                fingerprint="00",
                namespace=each.namespace.hex(),
                generation=each.number,
                weights_version=each.weights_version,
                slots=4,
            )
            for each in replicas
        ),
    )  # fmt: skip


def record(editions: Mapping[bytes, Edition]) -> Record:
    """What is written down beside storage."""
    return Record(
        editions=tuple(
            EditionRecord(namespace=root.hex(), generation=each.generation, weights_version=each.weights_version)
            for root, each in editions.items()
        )
    )


def generation(replica: ReplicaConfig, number: int, weights: str = "") -> Generation:
    return Generation(number, weights, replica.namespace(number, weights))


def edition(of: Generation) -> dict[bytes, Edition]:
    return {of.namespace: Edition(of.number, of.weights_version)}


def test_nothing_written_down_begins_a_generation_of_this_life(replica: ReplicaConfig) -> None:
    """Without ledger and record nothing is known of what storage has: the number is one that no earlier life used."""
    assert editions_of(None, None) == {}
    assert generation_of(replica, {}, FIRST) == generation(replica, FIRST)


@pytest.mark.parametrize("weights", ["", "step 9"])
def test_generation_goes_on(replica: ReplicaConfig, weights: str) -> None:
    """Generation and weights are those that were written down, in the ledger or beside storage."""
    written = generation(replica, 3, weights)

    for found in (
        editions_of(None, ledger(written)),
        editions_of(record(edition(written)), None),
        editions_of(record(edition(generation(replica, 0))), ledger(written)),
    ):
        assert generation_of(replica, found, FIRST) == written


@pytest.mark.parametrize(("told", "recorded"), [(5, 6), (6, 5), (6, 6)])
def test_later_of_two_generations_holds(replica: ReplicaConfig, told: int, recorded: int) -> None:
    """A crash between the two files, or storage that was away during a clear, brings no generation back."""
    both = edition(generation(replica, recorded)) | {ROOT: Edition(recorded)}
    found = editions_of(record(both), ledger(generation(replica, told), namespaces={ROOT: told}))

    assert found[ROOT].generation == 6
    assert generation_of(replica, found, FIRST) == generation(replica, 6)


def test_another_configuration_starts_anew(replica: ReplicaConfig, tmp_path: Path) -> None:
    """With another revision what was written down does not count, unless weights were set, which stand in its place."""
    other = configured(tmp_path, "2")
    plain, weights = generation(replica, 3), generation(replica, 3, "step 9")

    assert generation_of(other, editions_of(None, ledger(plain)), FIRST) == generation(other, FIRST)
    assert generation_of(other, editions_of(None, ledger(weights)), FIRST) == generation(other, 3, "step 9")


def test_record_that_contradicts_itself_does_not_count(replica: ReplicaConfig) -> None:
    """A namespace that is not that of its generation and weights is nobody's."""
    odd = Generation(3, "step 9", replica.namespace(2, "step 9"))

    assert generation_of(replica, editions_of(None, ledger(odd)), FIRST) == generation(replica, FIRST)


@pytest.mark.parametrize("canonical", [True, False])
def test_namespaces_of_a_canonical_root_have_the_later_generation(*, canonical: bool) -> None:
    """Where storage holds blocks in their canonical layout, namespaces that share them have the largest number."""
    one, two, shared = b"1" * 32, b"2" * 32, b"c" * 32
    layout = CanonicalLayout(fingerprint=bytes(16), parts=1, runs=1)
    told = ledger(namespaces={one: 3, two: 5})
    told = structs.replace(
        told,
        layout="canonical" if canonical else "engine",
        namespaces=tuple(
            structs.replace(each, canonical=layout, canonical_root=shared.hex()) for each in told.namespaces
        ),
    )

    found = editions_of(record({shared: Edition(4)}), told, canonical=canonical)

    expected = {shared: 5} if canonical else {shared: 4, one: 3, two: 5}
    assert {root: each.generation for root, each in found.items()} == expected


@pytest.mark.parametrize("canonical", [True, False])
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("recorded", "expected"), [(2, None), (3, 3), (4, 4), (None, None)])
def test_generation_of_another_layout_is_not_taken(
    recorded: int | None, expected: int | None, *, is_known: bool, canonical: bool
) -> None:
    """The ledger of a daemon whose storage had another layout, or maybe, tells only that an older record is outdated.

    Under its number storage may hold blocks in this layout that were cleared. Namespaces without a canonical layout go
    on in it.
    """
    one, plain, shared = b"1" * 32, b"p" * 32, b"c" * 32
    told = ledger(namespaces={one: 3, plain: 7})
    told = structs.replace(
        told,
        layout=("engine" if canonical else "canonical") if is_known else UNSET,
        namespaces=(structs.replace(told.namespaces[0], canonical_root=shared.hex()), told.namespaces[1]),
    )
    root = shared if canonical else one
    written = None if recorded is None else record({root: Edition(recorded)})

    found = editions_of(written, told, canonical=canonical)

    assert {each: edition.generation for each, edition in found.items()} == (
        {plain: 7} if expected is None else {plain: 7, root: expected}
    )


def test_lives_begin_with_numbers_that_grow() -> None:
    """A later start has larger numbers than all generations of one before, small enough for every JSON reader."""
    epochs = [1_760_000_000_000, 1_760_000_000_001, 2_199_000_000_000]
    firsts = [first_of(each, chance) for each, chance in zip(epochs, (4095, 0, 4095), strict=True)]

    assert firsts == sorted(set(firsts))
    assert firsts[-1] < 1 << 53
    assert first_of((1 << 63) - 1, 4095) < 1 << 63
