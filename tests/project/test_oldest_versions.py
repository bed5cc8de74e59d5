"""What ``make oldest`` installs."""

from __future__ import annotations

from tests.project.oldest_versions import oldest_versions


def test_lower_bounds_of_both_distributions_are_found() -> None:
    """Dependencies and extras of both distributions count, tools that judge the code and torch do not."""
    found = oldest_versions()

    assert {"msgspec", "pydantic", "blake3", "cryptography", "transformers", "cuda-bindings"} <= set(found)
    assert not {"torch", "ruff", "pytest", "pdoc"} & set(found)
