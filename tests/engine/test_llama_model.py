"""The model and its attention against independent implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

import torch
import transformers
from torch import Tensor

from examples.llama_engine.attention import DecodeAttention, PagedAttention, PagedRows, write_rows
from examples.llama_engine.config import ModelError, read_config
from examples.llama_engine.model import Llama
from examples.llama_engine.weights import head_range, load_weights, random_source, weight_source
from tests.engine.tiny_llama import TINY, layout_of, prompt


def at_once(item: int, layer: int) -> None:
    """Nothing is loading."""


class ContiguousAttention:
    """Attention over one request whose rows are all in this call: softmax written out, no pages."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (tensor.repeat_interleave(groups, dim=1).transpose(0, 1) for tensor in (k, v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed: Tensor = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return mixed.transpose(0, 1)


@pytest.mark.parametrize(("tied", "file_size"), [(False, "5GB"), (False, "60KB"), (True, "5GB")])
def test_logits_equal_those_of_transformers(tmp_path: Path, tied: bool, file_size: str) -> None:
    """A checkpoint that transformers saved, in one file or many, gives the logits that transformers computes."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(  # type: ignore[call-arg]  # both major versions take rope_theta
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=199, rope_theta=50_000.0, tie_word_embeddings=tied, initializer_range=0.3,
    )  # fmt: skip
    reference = transformers.LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    reference.save_pretrained(tmp_path, max_shard_size=file_size)
    tokens = torch.tensor(prompt(40))
    ours_config = read_config(tmp_path)
    assert ours_config.rope_theta == 50_000.0
    weights = load_weights(ours_config, weight_source(tmp_path, seed=0), 0, 1, torch.device("cpu"))
    model = Llama(ours_config, weights, lambda _: None)
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
        logits = model.logits(model.forward(tokens, torch.arange(40), ContiguousAttention()))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (file_size == "60KB")
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", ["ascending", "scattered"])
def test_paged_attention_equals_contiguous_attention(order: str) -> None:
    """Where the blocks lie in the pool makes no difference to what attention computes, and neither does the split."""
    torch.manual_seed(1)
    length, split = 30, 13
    q, k, v = torch.randn(length, 4, 16), torch.randn(length, 2, 16), torch.randn(length, 2, 16)
    table = torch.arange(8) if order == "ascending" else torch.tensor([11, 2, 7, 0, 15, 9, 4, 6])
    pool = [(torch.full((16, 4, 2, 16), float("nan")), torch.full((16, 4, 2, 16), float("nan")))]
    parts = []
    for start, end in ((0, split), (split, length)):
        attend = PagedAttention(pool, [PagedRows(0, torch.arange(start, end), table)], at_once)
        parts.append(attend(0, q[start:end], k[start:end], v[start:end]))
    torch.testing.assert_close(torch.cat(parts), ContiguousAttention()(0, q, k, v), rtol=1e-5, atol=1e-5)


def test_paged_attention_keeps_the_requests_of_a_step_apart() -> None:
    """Two requests in one step attend to their own blocks only."""
    torch.manual_seed(2)
    q, k, v = torch.randn(12, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    pool = [(torch.zeros(8, 4, 2, 16), torch.zeros(8, 4, 2, 16))]
    requests = [
        PagedRows(0, torch.arange(5), torch.tensor([6, 1])), PagedRows(5, torch.arange(7), torch.tensor([0, 5]))
    ]  # fmt: skip
    together = PagedAttention(pool, requests, at_once)(0, q, k, v)
    alone = ContiguousAttention()
    expected = torch.cat([alone(0, q[:5], k[:5], v[:5]), alone(0, q[5:], k[5:], v[5:])])
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-5)


def test_decode_attention_equals_paged_attention() -> None:
    """One row of each request: contexts of other lengths, tables longer than these, and unwritten slots."""
    torch.manual_seed(3)
    lengths, tables = (1, 4, 11), torch.tensor([[3, 0, 0, 0], [8, 0, 0, 0], [1, 12, 5, 3]])
    pool = [(torch.full((16, 4, 2, 16), float("nan")), torch.full((16, 4, 2, 16), float("nan")))]
    for length, table in zip(lengths, tables, strict=True):
        known = torch.randn(length, 2, 16), torch.randn(length, 2, 16)
        PagedAttention(pool, [PagedRows(0, torch.arange(length), table)], at_once)(
            0, torch.randn(length, 4, 16), *known
        )
    q, k, v = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    rows = [
        PagedRows(row, torch.tensor([length]), table)
        for row, (length, table) in enumerate(zip(lengths, [*tables[:1], torch.tensor([8, 9]), tables[2]], strict=True))
    ]
    expected = PagedAttention(pool, rows, at_once)(0, q, k, v)
    tables[1, 1] = 9
    waited: list[int] = []
    found = DecodeAttention(pool, torch.tensor(lengths), tables, waited.append)(0, q, k, v)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert waited == [0]


def test_random_weights_are_the_same_on_every_shard_and_differ_by_seed() -> None:
    """A seed names one model, whichever tensors a shard asks for and in whatever order."""
    first, again, other = random_source(5), random_source(5), random_source(6)
    again("model.layers.1.mlp.up_proj.weight", (96, 64))
    name, shape = "model.layers.0.self_attn.q_proj.weight", (64, 64)
    assert torch.equal(first(name, shape), again(name, shape))
    assert not torch.equal(first(name, shape), other(name, shape))


def test_heads_are_split_and_repeated_over_shards() -> None:
    """More heads than shards are divided; fewer are repeated over neighbouring shards."""
    assert [head_range(8, shard, 4) for shard in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [head_range(2, shard, 4) for shard in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_pool_of_another_model_is_refused() -> None:
    """A pool with other heads, layers or shards is no memory for this model; block size and dtype are the daemon's."""
    half = layout_of(TINY, shards=2)
    TINY.check_pool(half, shards=2)
    served = msgspec.structs.replace(half, block_size=32, order="block_first")
    TINY.check_pool(served, shards=2)
    with pytest.raises(ModelError, match="on 1 shards"):
        TINY.check_pool(half, shards=1)
    with pytest.raises(ModelError, match="layers=4"):
        msgspec.structs.replace(TINY, num_hidden_layers=4).check_pool(half, shards=2)


def test_weights_that_do_not_split_are_refused() -> None:
    """A number of shards that does not divide the heads is named in the error."""
    with pytest.raises(ModelError, match="4 heads"):
        load_weights(TINY, random_source(0), 0, 3, torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_config_of_another_model_is_refused(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    """A model that this engine would compute wrongly is refused, and the error says why."""
    config = {**msgspec.to_builtins(TINY), "model_type": "llama", **change}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    with pytest.raises(ModelError, match=reason):
        read_config(tmp_path)


def test_rows_are_written_without_a_copy_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is deterministic, on a device it would write into a copy, and bring it back over what was loaded."""
    modes: list[bool] = []
    write = Tensor.index_put_

    def noted(pages: Tensor, *arguments: Any) -> Tensor:
        modes.append(torch.are_deterministic_algorithms_enabled())
        return write(pages, *arguments)

    monkeypatch.setattr(Tensor, "index_put_", noted)
    torch.use_deterministic_algorithms(mode=True)
    try:
        pages = torch.zeros(4, 2, 16, 2, 8)[:, 0]
        write_rows(pages, (torch.tensor([3]), torch.tensor([5])), torch.ones(1, 2, 8))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(mode=False)

    assert modes == [False]
    assert pages[3, 5].eq(1).all()
    assert pages.sum() == 2 * 8
