"""What `kvcached doctor --sglang` finds in SGLang's own interpreter: its version, its hooks, and kvcached's storage."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator

from kvcached_client.doctor.checks import Finding
from kvcached_client.sglang.hooks import check_interface
from kvcached_client.sglang.settings import TESTED_VERSION

_REPAIR = "see the message; repair SGLang's environment"


def sglang_findings() -> Iterator[Finding]:
    """Later ones depend on earlier ones."""
    if importlib.util.find_spec("sglang") is None:
        fix = f"name SGLang's interpreter: --python PYTHON; or install SGLang {TESTED_VERSION}"
        yield Finding("sglang", "fail", "SGLang is not installed here", fix)
        return
    yield _version()
    try:
        check_interface()
    except ValueError as error:
        yield Finding("hooks", "fail", str(error), f"install SGLang {TESTED_VERSION}, or a newer kvcached-client")
        return
    except Exception as error:  # noqa: BLE001 - SGLang's imports fail in many ways
        yield Finding("hooks", "fail", f"{type(error).__name__}: {error}", _REPAIR)
        return
    yield Finding("hooks", "ok", "SGLang has what the hooks need")
    try:
        storage = importlib.import_module("kvcached_client.sglang").KvcachedStorage
    except Exception as error:  # noqa: BLE001 - as above
        yield Finding("storage backend", "fail", f"KvcachedStorage: {type(error).__name__}: {error}", _REPAIR)
        return
    yield Finding("storage backend", "ok", f"{storage.__module__}.{storage.__name__}")


def _version() -> Finding:
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    if version == TESTED_VERSION:
        return Finding("sglang", "ok", f"sglang {version}")
    text = f"sglang {version}; kvcached is tested with {TESTED_VERSION}"
    return Finding("sglang", "warn", text, f"compare outputs with those of SGLang alone, or install {TESTED_VERSION}")
