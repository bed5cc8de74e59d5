"""Which generation a replica starts in."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcached.config import ReplicaConfig, load_config
from kvcached.generations import Generation, generation_of
from kvcached.ledger import Ledger, ReplicaRecord, boot_id

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


@pytest.fixture
def replica(tmp_path: Path) -> ReplicaConfig:
    return configured(tmp_path)


def configured(folder: Path, revision: str = "1") -> ReplicaConfig:
    path = folder / "kvcached.toml"
    path.write_text(CONFIG.format(revision=revision))
    (replica,) = load_config(path, environment={}).replica
    return replica


def ledger(*records: tuple[str, Generation]) -> Ledger:
    """What an earlier daemon wrote down of replicas."""
    return Ledger(
        boot=boot_id(),
        epoch=1,
        host=None,
        spaces=(),
        replicas=tuple(
            ReplicaRecord(
                name=name,
                fingerprint="00",
                namespace=each.namespace.hex(),
                generation=each.number,
                weights_version=each.weights_version,
                slots=4,
            )
            for name, each in records
        ),
        workers=(),
        sessions=(),
    )


def generation(replica: ReplicaConfig, number: int, weights: str = "") -> Generation:
    return Generation(number, weights, replica.namespace(number, weights))


def test_first_generation_without_a_ledger(replica: ReplicaConfig) -> None:
    """Where nothing was written down the namespace is what the configuration says."""
    assert generation_of(replica, None) == generation_of(replica, ledger()) == generation(replica, 0)


@pytest.mark.parametrize("weights", ["", "step 9"])
def test_generation_goes_on(replica: ReplicaConfig, weights: str) -> None:
    """Generation and weights are those that were written down, for another replica of the namespace, too."""
    written = generation(replica, 3, weights)

    assert generation_of(replica, ledger(("a", written))) == written
    assert generation_of(replica, ledger(("gone", written), ("a", generation(replica, 0)))) == written


def test_another_configuration_starts_anew(replica: ReplicaConfig, tmp_path: Path) -> None:
    """With another revision what was written down does not count, unless weights were set, which stand in its place."""
    other = configured(tmp_path, "2")

    assert generation_of(other, ledger(("a", generation(replica, 3)))) == generation(other, 0)
    assert generation_of(other, ledger(("a", generation(replica, 3, "step 9")))) == generation(other, 3, "step 9")


def test_record_that_contradicts_itself_does_not_count(replica: ReplicaConfig) -> None:
    """A namespace that is not that of its generation and weights is nobody's."""
    odd = Generation(3, "step 9", replica.namespace(2, "step 9"))

    assert generation_of(replica, ledger(("a", odd))) == generation(replica, 0)
