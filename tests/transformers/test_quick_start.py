"""The quick start for transformers, run as it stands in docs/quick-start.md."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.project.quick_start import daemon_of, shown, walk
from tests.transformers.models import llama


@pytest.mark.timeout(240)
def test_second_process_finds_the_prompt(tmp_path: Path) -> None:
    """With a model in the folder MODEL and the daemon of the section on vLLM, the program prints what is shown."""
    llama(vocab_size=1000).save_pretrained(tmp_path / "MODEL")
    with daemon_of("vLLM", tmp_path):
        assert walk("transformers", tmp_path) == shown("transformers")
