from __future__ import annotations

import pytest

from kvcached_client import keys


@pytest.fixture(params=["native", "pure"])
def hashing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to the same keys; the native one only where it was built."""
    if request.param == "pure":
        monkeypatch.setattr(keys, "native_blake3_blocks", None)
        monkeypatch.setattr(keys, "native_xxh3_blocks", None)
    elif keys.native_blake3_blocks is None:
        pytest.skip("the native helper was not built: pip install -e kvcached_client, with a C compiler")
    return str(request.param)
