from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from kvcached.config.machine import check_machine
from kvcached.config.problems import ConfigError
from kvcached.config.schema import Config, load_config
from kvcached.config.tables import TcpAddress


def load(tmp_path: Path, listen: str) -> Config:
    path = tmp_path / "kvcached.toml"
    path.write_text(f'[host]\nsize_bytes = "8MiB"\nslab_bytes = "1MiB"\n\n[offload]\n\n[http]\nlisten = "{listen}"\n')
    return load_config(path, environment={}, options={"run_dir": str(tmp_path / "run")})


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:9410", TcpAddress("127.0.0.1", 9410)),
        ("127.8.0.1:1", TcpAddress("127.8.0.1", 1)),
        ("[::1]:65535", TcpAddress("::1", 65535)),
        ("unix:/run/kvcached/http.sock", "/run/kvcached/http.sock"),
    ],
)
def test_listen_is_a_loopback_address_or_a_path(listen: str, address: TcpAddress | str, tmp_path: Path) -> None:
    """Loopback addresses of both families and absolute paths are taken."""
    http = load(tmp_path, listen).http

    assert http is not None
    assert http.address == address


@pytest.mark.parametrize(
    ("listen", "said"),
    [
        ("0.0.0.0:9410", "0.0.0.0 can be reached from other machines"),
        ("[::]:9410", ":: can be reached from other machines"),
        ("10.1.2.3:9410", "10.1.2.3 can be reached from other machines"),
        ("localhost:9410", "'localhost' is no IP address; names are not looked up"),
        (":9410", "'' is no IP address"),
        ("127.0.0.1", "is no address"),
        ("127.0.0.1:0", "is no address"),
        ("127.0.0.1:65536", "is no address"),
        ("::1:9410", "is no address"),
        ("unix:http.sock", "has no absolute path"),
        (f"unix:/{'x' * 107}", "has a path of 108 bytes, 107 are possible"),
    ],
)
def test_listen_elsewhere_is_refused(listen: str, said: str, tmp_path: Path) -> None:
    """An address that others reach, a name, a missing port and a bad path are refused in the line of the key."""
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, listen)

    (problem,) = refused.value.problems
    assert problem.source.endswith(".toml:8")
    assert problem.what.startswith(said)


@pytest.mark.parametrize("package", ["prometheus_client", "h11"])
def test_missing_package_is_a_problem_where_http_is_asked_for(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a package of the extra, the configuration is refused with the command that installs it, at first."""
    find_spec = importlib.util.find_spec

    def found(name: str) -> ModuleSpec | None:
        return None if name == package else find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    with pytest.raises(ConfigError) as refused:
        check_machine(load(tmp_path, "127.0.0.1:9410"))

    (problem,) = refused.value.problems
    assert (problem.key, problem.what) == ("http.listen", f"needs the package {package}")
    assert problem.fix == f"pip install {package}"
    check_machine(load(tmp_path, "127.0.0.1:9410"), is_restart=True)
    (tmp_path / "kvcached.toml").write_text('[host]\nsize_bytes = "8MiB"\nslab_bytes = "1MiB"\n\n[offload]\n')
    check_machine(load_config(tmp_path / "kvcached.toml", environment={}))
