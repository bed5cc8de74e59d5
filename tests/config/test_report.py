"""What `check-config` prints is a file that loads to the same configuration, whatever is in it."""

from __future__ import annotations

from pathlib import Path

from kvcached.config.report import as_toml
from kvcached.config.schema import Config, load_config

HOST = '[host]\nsize_bytes = "8MiB"\nslab_bytes = "1MiB"\n\n[offload]\n'


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "kvcached.toml"
    path.write_text(text)
    return load_config(path, environment={}, options={"run_dir": str(tmp_path)})


def test_settings_of_any_kind_load_to_the_same(tmp_path: Path) -> None:
    """Settings of a backend may have any keys, and values of every type that TOML has."""
    settings = r"""
"a b" = 1
"x.y" = {"k z" = 2, bare_1-a = {}}
"" = "empty"
"\"\u007f" = "\u007f\t\n\\\"ä"
day = 1979-05-27
moment = 1979-05-27T07:32:00.5Z
here = 1979-05-27T07:32:00
hour = 07:32:00
fraction = 1.5
large = 1e300
most = inf
least = -inf
empty = []
tables = [{a = 1}, {b = {c = "x"}}]
mixed = [1, {a = 1}, [true, "\u007f"], {}]
begins_with_a_table = [{a = 1}, 2]
"""
    disk = '\n[storage.local_disk]\ndirectory = "/d"\ncapacity_bytes = "1GiB"\n'
    config = load(tmp_path, f'{HOST}[storage]\nbackend = "mine"\n[storage.settings]{settings}{disk}')
    assert config.storage is not None
    assert len(config.storage.settings) == 16
    assert config.storage.local_disk == {"directory": "/d", "capacity_bytes": "1GiB"}

    assert load(tmp_path, as_toml(config)) == config


def test_text_that_toml_wants_escaped_loads_to_the_same(tmp_path: Path) -> None:
    """The one character that JSON leaves as it is, and TOML refuses, is escaped."""
    config = load(tmp_path, HOST + '[access]\noperate = ["a\\u007f\\u0085b"]\n')

    assert load(tmp_path, as_toml(config)) == config
