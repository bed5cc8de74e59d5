"""Where the sockets are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcached_client.errors import BadRequest
from kvcached_client.transport.run_dir import default_run_dir, rpc_endpoint, socket_path

VARIABLES = ("KVCACHED_RUN_DIR", "RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"KVCACHED_RUN_DIR": "/a", "RUNTIME_DIRECTORY": "/b", "XDG_RUNTIME_DIR": "/c"}, "/a"),
        ({"RUNTIME_DIRECTORY": "/b:/d", "XDG_RUNTIME_DIR": "/c"}, "/b"),
        ({"KVCACHED_RUN_DIR": "", "XDG_RUNTIME_DIR": "/c"}, "/c/kvcached"),
        ({}, f"/tmp/kvcached-{os.getuid()}"),  # noqa: S108 - the name that is promised
    ],
)
def test_run_dir_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    """The most specific variable that is set and not empty wins."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_run_dir() == Path(expected)


def test_socket_path_is_limited_to_what_the_kernel_takes() -> None:
    """107 bytes are fine and 108 are an error that names both numbers, counted in bytes and not in characters."""
    name = "attach.sock"
    longest = "/" + "d" * (107 - len(name) - 2)
    assert len(socket_path(longest, name)) == 107
    with pytest.raises(BadRequest, match=r"108 bytes long, at most 107"):
        socket_path(longest + "d", name)
    with pytest.raises(BadRequest, match=r"108 bytes long"):
        socket_path(longest[:-1] + "é", name)


def test_rpc_endpoint_is_an_ipc_address() -> None:
    """The RPC socket lies beside the attach socket."""
    assert rpc_endpoint("/run/kvcached") == "ipc:///run/kvcached/rpc.sock"
