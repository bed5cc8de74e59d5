"""Pages that several ranks hold alike, on real daemons: which rank stores them, so that all ranks find them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.project.daemon_process import running_daemon
from tests.sglang.conftest import CONFIG, Make
from tests.sglang.fake_sglang import FakeSglang, MHATokenToKVPoolHost, Parallel, behind, hashes, places

KEYS = hashes(4)
#: Makes the storage of one of some tensor-parallel ranks.
MakeRank = Callable[..., Any]


class MLATokenToKVPoolHost(MHATokenToKVPoolHost):
    """The host pool of latent attention."""


@pytest.fixture
def make_rank(make: Make, fake: FakeSglang, tmp_path: Path) -> MakeRank:
    """With latent attention; each node has a directory of its own.

    SGLang tells its storage the rank in the whole group, or with data parallelism of the attention that in its part.
    """

    def make_rank(rank: int, ranks: int, *, nodes: int = 1, stages: int = 1, context: int = 1, groups: int = 1) -> Any:
        per_node = max(ranks // max(nodes // stages, 1), 1)
        attention = ranks // context // groups
        fake.parallel = Parallel(rank, ranks, rank % attention, stages, nodes)
        told = (rank % attention, attention) if groups > 1 else (rank, ranks)
        return make(
            MLATokenToKVPoolHost(rank),
            tmp_path / f"node {rank // per_node}",
            is_mla_model=True,
            tp_rank=told[0],
            tp_size=told[1],
            attn_cp_rank=rank // attention % context,
            attn_cp_size=context,
        )

    return make_rank


@pytest.mark.parametrize(
    ("ranks", "sizes", "writers"),
    [
        (4, {}, [0]),
        (4, {"nodes": 2}, [0, 2]),
        (2, {"nodes": 2}, [0, 1]),
        (2, {"nodes": 4}, [0, 1]),
        (2, {"nodes": 2, "stages": 2}, [0]),
        (2, {"nodes": 4, "stages": 2}, [0, 1]),
        (4, {"context": 2}, [0, 2]),
        (4, {"context": 4}, [0, 1, 2, 3]),
        (8, {"context": 2, "nodes": 4}, [0, 2, 4, 6]),
        (8, {"groups": 2}, [0, 4]),
        (8, {"groups": 2, "nodes": 4}, [0, 2, 4, 6]),
    ],
)
def test_one_rank_of_a_node_stores_each_page(
    make_rank: MakeRank, ranks: int, sizes: dict[str, int], writers: list[int]
) -> None:
    """It is the first of the node's ranks that hold the same pages of the same requests."""
    made = [make_rank(rank, ranks, **sizes) for rank in range(ranks)]
    assert [rank for rank, storage in enumerate(made) if storage._config.is_storage_writer] == writers


@pytest.mark.parametrize("sizes", [{"nodes": 2}, {"context": 2}, {"context": 2, "nodes": 2}])
def test_all_ranks_find_what_the_writers_store(make_rank: MakeRank, tmp_path: Path, sizes: dict[str, int]) -> None:
    """SGLang uses what every rank finds, also on several nodes and with several context-parallel ranks."""
    with ExitStack() as stack:
        for node in range(sizes.get("nodes", 1)):
            stack.enter_context(running_daemon(CONFIG, tmp_path / f"node {node}"))
        made = [make_rank(rank, 4, **sizes) for rank in range(4)]
        for storage in made:
            if storage._config.is_storage_writer:
                assert storage.batch_set_v1(KEYS, places(0, 1, 2, 3), behind()) == [True] * 4
        assert [storage.batch_exists(KEYS) for storage in made] == [4] * 4
        for storage in made:
            storage.close()


def test_sglang_that_does_not_say_who_stores_is_refused(
    make_rank: MakeRank, fake: FakeSglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version in which the writers cannot be chosen would find nothing, so it is refused."""
    monkeypatch.delattr("tests.sglang.fake_sglang.StorageConfig.is_storage_writer")
    with pytest.raises(ValueError, match="not served with latent attention"):
        make_rank(0, 2, nodes=2)
