from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from kvcached.build import host_quota as daemon_quota
from kvcached.config.access import AccessConfig, EngineAccess
from kvcached.config.events import EventsConfig, EventsNamespace
from kvcached.config.problems import ConfigError, Problem, expectation, key_lines
from kvcached.config.quota import NamespaceQuota, QuotaConfig, TenantQuota
from kvcached.config.replica import GroupConfig, ReplicaConfig
from kvcached.config.report import as_toml, figures_of
from kvcached.config.schema import REPLICAS_MAX, Config, load_config
from kvcached.config.tables import HostConfig, HttpConfig, OffloadConfig, StorageConfig
from kvcached.config.tcp import TcpClient, TcpConfig
from kvcached_client.blocks.layout import KvGroup, PageOrder
from tests.config.reference import rows

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
GOOD = """\
heartbeat_interval_ms = 1000
session_ttl_ms = 9000

[[replica]]
name = "default"
model = "m"
slots = 64

[[replica.group]]
layers = 2
kv_heads = 2
head_dim = 8
v_head_dim = 8
dtype = "float32"
"""
BYTES_PER_BLOCK = 2 * 16 * 2 * (8 + 8) * 4


def load(tmp_path: Path, text: str, environment: dict[str, str] | None = None, **options: str) -> Config:
    path = tmp_path / "kvcached.toml"
    path.write_text(text)
    return load_config(path, environment=environment or {}, options=options)


def problems(tmp_path: Path, text: str, environment: dict[str, str] | None = None, **options: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, environment, **options)
    return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]


_TENANT = '[[host.quota.tenant]]\nlabel = "a"\nfloor_percent = 60\n'
_SIXTY = '[[host.quota.namespace]]\nlabel = "a*"\nfloor_percent = 60\n'

# Each: what to replace in GOOD, by what, and the one problem that follows.
BAD = {
    "unknown key": ("session_ttl_ms", "sesion_ttl_ms", ":2: sesion_ttl_ms = 9000: there is no such key; did you mean"),
    "text for a number": (
        "9000",
        '"9s"',
        ':2: session_ttl_ms = "9s": should be a valid integer; give an integer from 300',
    ),
    "fraction": ("9000", "9000.0", ":2: session_ttl_ms = 9000.0: should be a valid integer; give an integer from 300"),
    "boolean for a number": ("9000", "true", ":2: session_ttl_ms = true: should be a valid integer; give an integer"),
    "too small": (
        "9000",
        "10",
        ":2: session_ttl_ms = 10: is too small; give an integer from 300 to 3600000 (milliseconds)",
    ),
    "too large": (
        "slots = 64",
        "slots = 2147483648",
        ":7: replica[0].slots = 2147483648: is too large; give an integer",
    ),
    "short ttl": (
        "9000",
        "2999",
        ":2: session_ttl_ms = 2999: is less than 3 times heartbeat_interval_ms (1000); use 3000",
    ),
    "bad name": (
        '"default"',
        '"A/b"',
        ':5: replica[0].name = "A/b": has characters that are not allowed; give text of 32',
    ),
    "long name": ('"default"', f'"{"a" * 33}"', ": is too long; give text of 32 characters at most"),
    "empty name": ('"default"', '""', ':5: replica[0].name = "": is too short; give text'),
    "no model": ('model = "m"\n', "", ":4: replica[0].model: is missing; add it: text of 256 characters at most"),
    "CUDA devices of a pool on the CPU": (
        "slots",
        "cuda_devices = [0]\nslots",
        ':7: replica[0].cuda_devices = [0]: stands beside device = "cpu"; set device = "cuda"',
    ),
    "CUDA devices for other shards": (
        "slots",
        'device = "cuda"\ncuda_devices = [0, 1]\nslots',
        ":8: replica[0].cuda_devices = [0, 1]: names 2 devices for 1 shards; name one for each shard",
    ),
    "unknown device": (
        "slots",
        'device = "tpu"\nslots',
        ':7: replica[0].device = "tpu": is none of the choices; give one of',
    ),
    "no size": ("slots = 64", "", ":4: replica[0].slots: is missing, and so is pool_bytes; name one of the two"),
    "two sizes": (
        "slots = 64",
        "slots = 64\npool_bytes = 1",
        ":7: replica[0].slots = 64: stands beside pool_bytes; name one",
    ),
    "no block fits": (
        "slots = 64",
        "pool_bytes = 9",
        ":7: replica[0].pool_bytes = 9: holds no block: one takes 4096 bytes",
    ),
    "huge pool": (
        "slots = 64",
        "slots = 2147483647\nblock_size = 1024",
        "70368744177664 are possible; use fewer slots",
    ),
    "tiny blocks": (
        "slots = 64",
        "pool_bytes = 70368744177664\nblock_size = 1",
        ":7: replica[0].pool_bytes = 70368744177664: holds 274877906944 blocks, 2147483647 are possible",
    ),
    "unknown dtype": (
        "float32",
        "float3",
        ':14: replica[0].group[0].dtype = "float3": is none of the choices; give one',
    ),
    "no heads": (
        "kv_heads = 2",
        "kv_heads = 0",
        ":11: replica[0].group[0].kv_heads = 0: is too small; give an integer from 1",
    ),
    "dtype twice": (
        "slots",
        'kv_dtype = "int8"\nslots',
        ':7: replica[0].kv_dtype = "int8": stands beside group; write the',
    ),
    "two layouts": (
        "slots",
        'model_config = "x"\nslots',
        ':7: replica[0].model_config = "x": stands beside group; name one',
    ),
    "relative run_dir": (
        "heart",
        'run_dir = "run"\nheart',
        ':1: run_dir = "run": is no absolute path; start it with /',
    ),
    "long run_dir": (
        "heart",
        f'run_dir = "/{"x" * 99}"\nheart',
        "makes a socket path of 122 bytes, 107 are possible",
    ),
    "one table": (
        "[[replica.group]]",
        "[replica.group]",
        ":9: replica[0].group: is no array; give an array of tables",
    ),
    "name of the host pool": (
        '"default"',
        '"host"',
        ':5: replica[0].name = "host": is what reports call the host pool; choose another name',
    ),
    "quota below threshold": (
        "slots = 64",
        "slots = 64\nload_threshold_blocks = 8\nload_quota_blocks = 7",
        ":9: replica[0].load_quota_blocks = 7: is less than load_threshold_blocks (8)",
    ),
    "large watermark": (
        "slots = 64",
        "slots = 64\nfree_watermark_percent = 51",
        ":8: replica[0].free_watermark_percent = 51: is too large; give an integer from 0 to 50",
    ),
    "no host size": (
        "[[replica]]",
        "[host]\n[[replica]]",
        ":4: host.size_bytes: is missing, and so is memory_percent; name one of the two",
    ),
    "two host sizes": (
        "[[replica]]",
        "[host]\nsize_bytes = 67108864\nmemory_percent = 50\n[[replica]]",
        ":5: host.size_bytes = 67108864: stands beside memory_percent; name one of the two",
    ),
    "all memory": (
        "[[replica]]",
        "[host]\nmemory_percent = 91\n[[replica]]",
        ":5: host.memory_percent = 91: is too large; give an integer from 1 to 90",
    ),
    "unknown host key": (
        "[[replica]]",
        "[host]\nsize_bytes = 1\nslabs = 2\n[[replica]]",
        ":6: host.slabs = 2: there is no such key; did you mean slab_bytes?",
    ),
    "host is no table": ("[[replica]]", "host = 1\n[[replica]]", ":4: host = 1: is no table; give a table"),
    "odd slab": (
        "[[replica]]",
        "[host]\nsize_bytes = 100000\nslab_bytes = 5000\n[[replica]]",
        ":6: host.slab_bytes = 5000: is no multiple; give a size from 4KiB to 64TiB, a multiple",
    ),
    "slab without room for a block": (
        "[[replica]]",
        "[host]\nsize_bytes = 65536\nslab_bytes = 4096\n[[replica]]",
        "one takes 1 x 4096 bytes and as many headers; use 8192 or more",
    ),
    "host without a slab": (
        "[[replica]]",
        "[host]\nsize_bytes = 67108863\n[[replica]]",
        "makes 0 slabs of 67108864 bytes; namespaces, which take one each: 1; use 67108864 or more",
    ),
    "host of too many slots": (
        "slots = 64",
        "slots = 64\nblock_size = 1\n[host]\nsize_bytes = 70368744177664",
        "2147483647 are possible; use a smaller size_bytes",
    ),
    "floor above cap": (
        "[[replica]]",
        "[host]\nsize_bytes = 67108864\n[host.quota]\nfloor_percent = 40\ncap_percent = 30\n[[replica]]",
        ":7: host.quota.floor_percent = 40: is more than cap_percent, 30; use a smaller floor or a larger cap",
    ),
    "floors above all": (
        "[[replica]]",
        "[host]\nsize_bytes = 67108864\n" + 2 * _SIXTY + "[[replica]]",
        ":11: host.quota.namespace[1].floor_percent = 60: makes the floors of all these tables 120 percent together;",
    ),
    "floors of tenants of more than everything": (
        "[[replica]]",
        "[host]\nsize_bytes = 67108864\n" + _TENANT.replace('"a"', '"b"') + _TENANT + "[[replica]]",
        ":11: host.quota.tenant[1].floor_percent = 60: makes the floors of all these tables 120 percent together;",
    ),
    "floor of any number of tenants": (
        "[[replica]]",
        '[host]\nsize_bytes = 67108864\n[[host.quota.tenant]]\nlabel = "free-*"\nfloor_percent = 1\n[[replica]]',
        "host.quota.tenant[0].floor_percent = 1: is for each of any number of tenants, because 'free-*' is a pattern;",
    ),
    "quota of nobody": (
        "[[replica]]",
        "[host]\nsize_bytes = 67108864\n[[host.quota.namespace]]\ncap_percent = 30\n[[replica]]",
        ": host.quota.namespace[0].label: is missing; add it",
    ),
    "same name": ("[[replica]]", '[[replica]]\nname = "b"\n[[replica]]\nname = "b"\n[[replica]]', "replica[0].model"),
}


@pytest.mark.parametrize(("old", "new", "expected"), BAD.values(), ids=BAD)
def test_config_error_names_place_key_value_and_fix(old: str, new: str, expected: str, tmp_path: Path) -> None:
    """A mistake is reported with file, line, key, value, what is wrong and what to do."""
    assert old in GOOD

    found = problems(tmp_path, GOOD.replace(old, new, 1))

    text = "\n".join(found)
    assert expected in text
    assert all(problem.startswith("kvcached.toml:") and "; " in problem for problem in found)


def test_quota_of_the_host_pool_is_what_the_core_is_told(tmp_path: Path) -> None:
    """Tables of namespaces come before the bounds of all; without any, a namespace may have everything."""
    host = "[host]\nsize_bytes = 67108864\n"
    named = '[[host.quota.namespace]]\nlabel = "a*"\nfloor_percent = 60\n'
    text = GOOD.replace("[[replica]]", host + "[host.quota]\ncap_percent = 70\n" + named + "[[replica]]")

    quota = daemon_quota(load(tmp_path, text).host)
    assert (quota.bounds(["ab"], 100), quota.bounds(["b"], 100)) == ((60, 100), (0, 70))
    assert daemon_quota(load(tmp_path, GOOD.replace("[[replica]]", host + "[[replica]]")).host).bounds([], 9) == (0, 9)


def test_config_error_lists_every_mistake(tmp_path: Path) -> None:
    """Mistakes in different tables are reported together."""
    text = GOOD.replace("9000", '"x"').replace("64", "0").replace("layers = 2", "layers = -1")

    assert [problem.split(" = ")[0] for problem in problems(tmp_path, text)] == [
        "kvcached.toml:2: session_ttl_ms",
        "kvcached.toml:7: replica[0].slots",
        "kvcached.toml:10: replica[0].group[0].layers",
    ]


def test_config_refuses_two_replicas_of_one_name(tmp_path: Path) -> None:
    """Replica names are unique, and the problem is the second one's."""
    second = GOOD[GOOD.index("[[replica]]") :]

    assert problems(tmp_path, GOOD + second) == [
        'kvcached.toml:16: replica[1].name = "default": names an earlier replica, too; give each a name of its own'
    ]


def test_config_refuses_too_many_replicas(tmp_path: Path) -> None:
    """There are at most `REPLICAS_MAX`."""
    one = GOOD[GOOD.index("[[replica]]") :]
    text = "".join(one.replace("default", f"r{index}") for index in range(REPLICAS_MAX + 1))

    assert f"there are {REPLICAS_MAX + 1} replicas; name {REPLICAS_MAX} at most" in problems(tmp_path, text)[0]


@pytest.mark.parametrize("text", ["", "replica = []\n", "[host]\nsize_bytes = 67108864\n"])
def test_config_serves_somebody(text: str, tmp_path: Path) -> None:
    """Without a replica and without offload mode the daemon would serve nobody, and says what to add."""
    (problem,) = problems(tmp_path, text)

    assert "replica: is missing, and so is [offload]" in problem or "replica = []: is missing" in problem
    assert "each as [[replica]], or add [offload]" in problem


def test_config_takes_environment_over_file(tmp_path: Path) -> None:
    """Variables change keys of the root and of one table of an array, and leave the other keys alone."""
    environment = {
        "KVCACHED_SESSION_TTL_MS": "7000",
        "KVCACHED_REPLICA__0__SLOTS": "17",
        "KVCACHED_REPLICA__0__NAME": "other",
        "KVCACHED_LOG_LEVEL": "debug",
        "KVCACHED_RUN_DIR": "/run/here",
        "KVCACHED_LOG_FORMAT": "",
        "KVCACHED_CONFIG": "not/a/key",
        "PATH": "/bin",
    }

    config = load(tmp_path, GOOD, environment)

    assert (config.session_ttl_ms, config.log_level, config.log_format) == (7000, "debug", "plain")
    assert config.run_dir == Path("/run/here")
    assert (config.replica[0].slot_count, config.replica[0].name, config.replica[0].model) == (17, "other", "m")


def test_config_passes_over_service_links_of_kubernetes(tmp_path: Path) -> None:
    """Variables that Kubernetes makes for services called kvcached or kvcached-something are nobody's typing error."""
    links = {
        "KVCACHED_SERVICE_HOST": "10.96.0.1",
        "KVCACHED_SERVICE_PORT": "8000",
        "KVCACHED_SERVICE_PORT_HTTP": "8000",
        "KVCACHED_PORT": "tcp://10.96.0.1:8000",
        "KVCACHED_PORT_8000_TCP": "tcp://10.96.0.1:8000",
        "KVCACHED_PORT_8000_TCP_PROTO": "tcp",
        "KVCACHED_PORT_8000_TCP_PORT": "8000",
        "KVCACHED_PORT_8000_TCP_ADDR": "10.96.0.1",
        "KVCACHED_NODE_METRICS_PORT": "udp://10.96.0.1:53",
        "KVCACHED_NODE_METRICS_SERVICE_HOST": "10.96.0.1",
    }

    assert load(tmp_path, GOOD, links) == load(tmp_path, GOOD)


def test_config_passes_over_variables_of_compose_and_of_the_build(tmp_path: Path) -> None:
    """Whoever has exported a tag for configs/compose.yaml, or the switch of the build, can start a daemon."""
    compose = (ROOT / "configs/compose.yaml").read_text()
    used = {*re.findall(r"\$\{(KVCACHED_\w+)", compose), *re.findall(r"KVCACHED_\w+", (ROOT / "setup.py").read_text())}

    assert used == {"KVCACHED_TAG", "KVCACHED_COMPILE"}
    assert load(tmp_path, GOOD, dict.fromkeys(used, "1")) == load(tmp_path, GOOD)


@pytest.mark.parametrize("value", ["[" * 3000, "[" * 490 + "]" * 490, "1" * 5000])
def test_config_takes_a_variable_that_no_parser_can_read_as_text(value: str, tmp_path: Path) -> None:
    """Brackets nested too deeply, and a number of too many digits, are mistakes as any other, not a crash."""
    (problem,) = problems(tmp_path, GOOD, {"KVCACHED_LOG_LEVEL": value})

    assert problem.startswith("environment KVCACHED_LOG_LEVEL: log_level = ")
    assert "is none of the choices" in problem


def test_config_takes_options_over_environment(tmp_path: Path) -> None:
    """An option wins over a variable, which wins over the file."""
    config = load(tmp_path, GOOD, {"KVCACHED_LOG_LEVEL": "debug", "KVCACHED_RUN_DIR": "/run/a"}, run_dir="/run/b")

    assert (config.run_dir, config.log_level) == (Path("/run/b"), "debug")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("KVCACHED_SESSION_TTL_MS", "5", "session_ttl_ms = 5: is too small"),
        ("KVCACHED_SESSION_TTL_MS", "1000", "session_ttl_ms = 1000: is less than 3 times"),
        ("KVCACHED_SESION_TTL_MS", "5", "sesion_ttl_ms = 5: there is no such key; did you mean session_ttl_ms?"),
        ("KVCACHED_PORT", "8000", "port = 8000: there is no such key"),
        ("KVCACHED_STORAGE__SERVICE_HOST", "x", "storage.service_host"),
        ("KVCACHED_REPLICA__0__SLOTS", "many", 'replica[0].slots = "many": should be a valid integer'),
        ("KVCACHED_REPLICA__7__SLOTS", "1", "replica[7].slots = 1: there is no such key"),
        ("KVCACHED_REPLICA__SLOTS", "1", "replica.slots = 1: there is no such key"),
        ("KVCACHED_SESSION_TTL_MS__X", "1", "session_ttl_ms.x = 1: there is no such key"),
    ],
)
def test_config_error_names_the_variable(name: str, value: str, expected: str, tmp_path: Path) -> None:
    """A mistake in the environment is reported under the variable's name, an unknown variable included."""
    assert problems(tmp_path, GOOD, {name: value})[0].startswith(f"environment {name}: {expected}")


def test_config_error_names_a_variable_that_is_no_text(tmp_path: Path) -> None:
    """A variable whose name is not UTF-8 is refused, with bytes that people can read, and one of others is not."""
    (refused,) = problems(tmp_path, GOOD, {"KVCACHED_X\udcff": "1"})
    assert refused.startswith("environment KVCACHED_X\\xff: name: is not UTF-8; unset it")
    assert load(tmp_path, GOOD, {"OTHER_X\udcff": "1"}) == load(tmp_path, GOOD)


def test_config_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Editors write one, and no line of the file is another one for it."""
    assert load(tmp_path, f"\ufeff{GOOD}") == load(tmp_path, GOOD)
    (refused,) = problems(tmp_path, f"\ufeffx = 1\n{GOOD}")
    assert refused.startswith("kvcached.toml:1: x = 1: there is no such key")


def test_config_expects_text_without_a_limit_in_words() -> None:
    """A key that takes text of any length says what the text has to match, and no length."""
    table = {"type": "string", "pattern": "^a$"}
    assert [expectation("x", {**table, **more}) for more in ({}, {"maxLength": 9})] == [
        "text matching ^a$",
        "text of 9 characters at most, matching ^a$",
    ]


def test_config_error_names_the_option(tmp_path: Path) -> None:
    """A mistake in an option is reported under the option's name."""
    assert problems(tmp_path, GOOD, run_dir="here")[0].startswith(
        'option --run-dir: run_dir = "here": is no absolute path'
    )


def test_config_default_run_dir_is_the_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a run_dir, daemon and client resolve the same one."""
    monkeypatch.delenv("KVCACHED_RUN_DIR", raising=False)
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/kvcached")

    assert load(tmp_path, GOOD).run_dir == Path("/run/kvcached")


def test_config_is_frozen(tmp_path: Path) -> None:
    """A loaded configuration cannot be changed."""
    config = load(tmp_path, GOOD)

    with pytest.raises(ValidationError, match="frozen"):
        config.session_ttl_ms = 1  # type: ignore[misc]


def test_config_pool_bytes_become_slots(tmp_path: Path) -> None:
    """A budget of bytes holds as many whole blocks as fit."""
    config = load(tmp_path, GOOD.replace("slots = 64", f"pool_bytes = {3 * BYTES_PER_BLOCK - 1}"))

    assert config.replica[0].slot_count == 2


@pytest.mark.parametrize(
    ("written", "meant"), [("storage.key", "{0}/storage.key"), ("/etc/storage.key", "/etc/storage.key")]
)
def test_config_key_file_is_beside_the_file(tmp_path: Path, written: str, meant: str) -> None:
    """A relative path of a key starts at the configuration's folder, wherever the daemon was started."""
    text = GOOD + f'[host]\nsize_bytes = 67108864\n[storage]\nkey_file = "{written}"\n'

    storage = load(tmp_path, text).storage

    assert storage is not None
    assert str(storage.key_file) == meant.format(tmp_path)

    tcp = load(tmp_path, GOOD + TCP.replace("daemon.key", written) + TCP_CLIENT).tcp
    assert tcp is not None
    assert str(tcp.key_file) == meant.format(tmp_path)


def test_config_layout_from_model_config(tmp_path: Path) -> None:
    """A model's config.json beside the configuration gives the layout of one shard."""
    model = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    (tmp_path / "model.json").write_text(json.dumps(model))
    text = GOOD[: GOOD.index("[[replica.group]]")] + 'model_config = "model.json"\nshards = 2\nkv_dtype = "float16"\n'

    layout = load(tmp_path, text).replica[0].layout

    assert layout.groups == (KvGroup(layers=3, kv_heads=2, head_dim=16, v_head_dim=16, dtype="float16"),)
    assert (layout.block_size, layout.shards) == (16, 2)


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "holds no JSON object"),
        ('{"num_hidden_layers": 0}', "model config: num_hidden_layers is 0"),
    ],
)
def test_config_error_for_model_config(contents: str | None, expected: str) -> None:
    """What is wrong with a model's config.json is reported at the key that names it."""
    text = GOOD[: GOOD.index("[[replica.group]]")] + 'model_config = "model.json"\n'
    with TemporaryDirectory() as folder:  # the names of pytest's are so long that the report would cut the path
        if contents is not None:
            (Path(folder) / "model.json").write_text(contents)
        problem = problems(Path(folder), text)[0]

    assert f':9: replica[0].model_config = "model.json": {expected}' in problem


def test_config_figures(tmp_path: Path) -> None:
    """The figures are the layout's own sums."""
    (figures,) = figures_of(load(tmp_path, GOOD.replace("slots = 64", "slots = 64\nshards = 2")))

    assert (figures.bytes_per_block, figures.tokens) == (BYTES_PER_BLOCK, 64 * 16)
    assert (figures.pool_bytes_per_shard, figures.pool_bytes) == (64 * BYTES_PER_BLOCK, 128 * BYTES_PER_BLOCK)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_file_loads_and_its_report_loads_to_the_same(path: Path, tmp_path: Path) -> None:
    """Every file in configs/ loads, and the effective configuration printed for it is a file that means the same."""
    config = load_config(path, environment={})

    assert load(tmp_path, as_toml(config)) == config


def test_config_files_are_there() -> None:
    """The configurations that the documents name exist."""
    assert {"cpu-tp1.toml", "cpu-tp2.toml", "cpu-host.toml", "offload-cpu.toml", "offload-disk.toml"} <= {
        path.name for path in CONFIGS
    }


def test_config_groups_are_the_layouts_groups() -> None:
    """A group in the file has the fields of a group of a layout, and page_order its choices."""
    assert tuple(GroupConfig.model_fields) == KvGroup.__struct_fields__
    assert set(get_args(ReplicaConfig.model_fields["page_order"].annotation)) == set(get_args(PageOrder))


def test_config_documentation_has_every_key() -> None:
    """docs/configuration.md shows each key with what it takes, its default and its meaning, as the schema says."""
    text = (ROOT / "docs/configuration.md").read_text()
    models: list[type[BaseModel]] = [
        Config,
        HostConfig,
        QuotaConfig,
        NamespaceQuota,
        TenantQuota,
        OffloadConfig,
        StorageConfig,
        AccessConfig,
        EngineAccess,
        HttpConfig,
        TcpConfig,
        TcpClient,
        EventsConfig,
        EventsNamespace,
        ReplicaConfig,
        GroupConfig,
    ]

    expected = [row for model in models for row in rows(model)]

    assert [line for line in text.splitlines() if line.startswith("| `")] == expected


def test_key_lines_know_tables_arrays_and_keys() -> None:
    """A key's line is found in plain tables, arrays of tables and tables below them."""
    text = "a = 1\n[[r]]\nb = 2\n[[r.g]]\nc = 3\n[[r]]\n  b = 4\n[r.t]\nd = 5\n[x.y]\ne = 6\n"

    lines: dict[Any, int] = key_lines(text)

    assert lines["a",] == 1
    assert (lines["r", 0, "b"], lines["r", 0, "g", 0, "c"]) == (3, 5)
    assert (lines["r", 1], lines["r", 1, "b"], lines["r", 1, "t", "d"]) == (6, 7, 9)
    assert lines["x", "y", "e"] == 11


def test_problem_without_value_has_no_equals_sign() -> None:
    """A missing key is printed without a value."""
    assert str(Problem("f:1", "slots", "", "is missing", "add it")) == "f:1: slots: is missing; add it"


TCP = '[tcp]\nlisten = "10.0.0.5:9420"\nkey_file = "daemon.key"\n'
TCP_CLIENT = f'[[tcp.client]]\nname = "ops"\npublic_key = "{"0" * 40}"\nrole = "operate"\n'

BAD_TCP = {
    "no client": (TCP_CLIENT, "", "tcp.client: is missing"),
    "no key file": ('key_file = "daemon.key"\n', "", "tcp.key_file: is missing"),
    "no role": ('role = "operate"\n', "", "tcp.client[0].role: is missing"),
    "an engine": ('"operate"', '"engine"', 'tcp.client[0].role = "engine"'),
    "a hex key": ("0" * 40, "ab" * 32, "is no public key; copy it from `kvcached keys show FILE`: 40 characters"),
    "a name": ("10.0.0.5", "localhost", "'localhost' is no IP address; names are not looked up"),
    "no port": (":9420", "", 'is no address; give "ADDRESS:PORT"'),
    "a name twice": (TCP_CLIENT, TCP_CLIENT + TCP_CLIENT.replace("0", "1"), "tcp.client[1].name"),
    "a key twice": (TCP_CLIENT, TCP_CLIENT + TCP_CLIENT.replace("ops", "x"), "tcp.client[1].public_key"),
}


@pytest.mark.parametrize(("old", "new", "expected"), BAD_TCP.values(), ids=BAD_TCP)
def test_config_has_no_port_without_keys(tmp_path: Path, old: str, new: str, expected: str) -> None:
    """A TCP port needs an address, a key of the daemon, and at least one client with a key and a role of its own."""
    good = GOOD + TCP + TCP_CLIENT
    assert load(tmp_path, good).tcp is not None
    assert old in TCP + TCP_CLIENT

    with pytest.raises(ConfigError) as refused:
        load(tmp_path, GOOD + (TCP + TCP_CLIENT).replace(old, new))

    assert expected in str(refused.value)
    assert len(refused.value.problems) == 1, "one mistake, one line"
