"""SGLang's pages, as `kvcached doctor --sglang` compares them with the daemon's host pool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcached.doctor.sglang_flags import parse
from kvcached.doctor.sglang_layout import check_layout
from kvcached_client.doctor.checks import Finding
from kvcached_client.protocol.engine import OffloadInfo
from kvcached_client.types import Verify

#: In float16 a token has 8 layers, K and V, of 4 heads of 32 halves: 4 KiB.
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
TOKEN_BYTES = 4096


def findings(
    folder: Path, *arguments: str, slabs: int = 4, slab_bytes: int = 1 << 20, **fields: object
) -> list[Finding]:
    (folder / "config.json").write_text(json.dumps({**MODEL, **fields}))
    offered = OffloadInfo(slabs=slabs, slab_bytes=slab_bytes, namespaces_max=2, verify=Verify.ALWAYS)
    return list(check_layout(str(folder), parse(arguments), offered))


def the_finding(folder: Path, *arguments: str, **given: Any) -> Finding:
    (finding,) = findings(folder, "--page-size", "32", *arguments, **given)
    return finding


@pytest.mark.parametrize(
    ("arguments", "fields", "token_bytes"),
    [
        ([], {}, TOKEN_BYTES),
        (["--tp", "2"], {}, TOKEN_BYTES // 2),
        (["--tp", "2", "--pp", "2"], {}, TOKEN_BYTES // 4),
        (["--pp-size", "3"], {}, TOKEN_BYTES * 3 // 8),  # the stage with the most layers
        (["--tp=4", "--dp=2", "--enable-dp-attention"], {}, TOKEN_BYTES // 2),
        (["--tp=4", "--dp=2"], {}, TOKEN_BYTES // 4),
        (["--tp=4", "--attn-dp-size=2"], {}, TOKEN_BYTES // 2),
        (["--tp=4", "--attention-data-parallel-size=4"], {}, TOKEN_BYTES),
        (["--tp=4", "--attn-cp-size=2"], {}, TOKEN_BYTES // 2),
        (["--tp=4", "--attn-dp-size=2", "--attn-cp-size=2"], {}, TOKEN_BYTES),
        (["--tp", "x"], {}, TOKEN_BYTES),
        (["--dtype", "float32"], {}, 2 * TOKEN_BYTES),
        (["--kv-cache-dtype", "fp8_e4m3", "--dtype", "float32"], {}, TOKEN_BYTES // 2),
        ([], {"dtype": "float32"}, TOKEN_BYTES),
        ([], {"text_config": {**MODEL, "num_hidden_layers": 4}, "torch_dtype": "bfloat16"}, TOKEN_BYTES // 2),
        (["--tp", "2"], {"kv_lora_rank": 96, "qk_rope_head_dim": 32}, 8 * 128 * 2),
    ],
)
def test_bytes_of_a_page_follow_from_model_and_arguments(
    tmp_path: Path, arguments: list[str], fields: dict[str, Any], token_bytes: int
) -> None:
    """Heads are split over ranks that serve the same tokens, layers over stages; elements are those SGLang takes."""
    finding = the_finding(tmp_path, *arguments, **fields)
    assert (finding.level, finding.fix) == ("ok", "")
    assert f"a page of 32 tokens takes {32 * token_bytes} bytes on each of" in finding.text


def test_slab_that_is_too_small_has_a_fix_that_is_not(tmp_path: Path) -> None:
    """A slab without room for a page fails, and the size in the fix is the smallest that passes."""
    small = the_finding(tmp_path, slab_bytes=32 * TOKEN_BYTES)
    wanted = next(int(word) for word in small.fix.split() if word.isdecimal())
    assert (small.level, "--page-size" in small.fix) == ("fail", True)
    assert the_finding(tmp_path, slab_bytes=wanted).level == "ok"
    assert the_finding(tmp_path, slab_bytes=wanted - 4096).level == "fail"


def test_each_rank_takes_a_slab(tmp_path: Path) -> None:
    """A host pool with fewer slabs than ranks has no room for the last one."""
    assert the_finding(tmp_path, "--tp", "4", slabs=4).level == "ok"
    finding = the_finding(tmp_path, "--tp", "4", slabs=3)
    assert (finding.level, "the host pool has 3" in finding.text, "size_bytes" in finding.fix) == ("fail", True, True)


def test_pages_of_one_token_are_told(tmp_path: Path) -> None:
    """Without --page-size, SGLang makes a block of each token, which is a warning with a better size."""
    first, second = findings(tmp_path)
    assert (first.level, "--page-size 64" in first.fix) == ("warn", True)
    assert (second.level, f"a page of 1 tokens takes {TOKEN_BYTES} bytes" in second.text) == ("ok", True)


@pytest.mark.parametrize(
    ("arguments", "fields", "said"),
    [
        (["--kv-cache-dtype", "fp4_e2m1"], {}, "fp4_e2m1"),
        (["--page-size", "many"], {}, "many"),
        (["--tp", "3"], {}, "3 shards"),
        ([], {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ([], {"num_hidden_layers": None}, "num_hidden_layers"),
    ],
)
def test_page_that_is_not_told_is_a_warning(
    tmp_path: Path, arguments: list[str], fields: dict[str, Any], said: str
) -> None:
    """Where model and arguments do not tell how large a page is, the finding says why, and how to compare by hand."""
    finding = the_finding(tmp_path, *arguments, **fields)
    assert (finding.level, said in finding.text, "docs/configuration.md" in finding.fix) == ("warn", True, True)


def test_model_that_is_not_here_is_not_compared(tmp_path: Path) -> None:
    """A name of the hub tells no sizes: which folder to name is said."""
    offered = OffloadInfo(slabs=4, slab_bytes=1 << 20, namespaces_max=2, verify=Verify.ALWAYS)
    (finding,) = check_layout(str(tmp_path / "none"), parse(["--page-size", "64"]), offered)
    assert (finding.level, "--model DIR" in finding.fix) == ("warn", True)
