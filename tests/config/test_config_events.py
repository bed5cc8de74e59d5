"""`[events]`: endpoints that are there, and whose places are their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from kvcached.config.events import EventsConfig, EventsNamespace
from kvcached.config.problems import ConfigError
from kvcached.config.schema import Config, load_config
from kvcached.recovery.state_file import LEDGER_NAME, STOPPED_NAME
from kvcached.storage.process import LOCK_NAME as STORAGE_LOCK
from kvcached.storage.process import LOG_NAME
from kvcached_client.transport.run_dir import ATTACH_SOCKET_NAME, RPC_SOCKET_NAME
from kvcached_client.transport.run_dir import LOCK_NAME as DAEMON_LOCK

HOST = '[host]\nsize_bytes = "8MiB"\nslab_bytes = "1MiB"\n\n[offload]\n'
#: One file of each kind that a daemon makes in its run directory.
OWN_NAMES = [ATTACH_SOCKET_NAME, RPC_SOCKET_NAME, DAEMON_LOCK, LEDGER_NAME, f"{LEDGER_NAME}.new", STORAGE_LOCK]
OWN_NAMES += [STOPPED_NAME, LOG_NAME, "worker-default-0.sock", "worker-default-0.log", "worker-default-0.lock"]
TCP = '[tcp]\nlisten = "{}"\nkey_file = "daemon.key"\n'
TCP += f'[[tcp.client]]\nname = "x"\npublic_key = "{"0" * 40}"\nrole = "look"\n'
TCP_LISTEN, PORT = "tcp.listen", "tcp://127.0.0.1:5557"


def load(tmp_path: Path, events: dict[str, str], http: str = "", tcp: str = "") -> Config:
    """A configuration whose run directory is /run/here."""
    path = tmp_path / "kvcached.toml"
    tables = [HOST, "[events]\n", *(f'{key} = "{endpoint}"\n' for key, endpoint in events.items())]
    tables += [f'[http]\nlisten = "{http}"\n'] if http else []
    path.write_text("".join([*tables, TCP.format(tcp) if tcp else ""]))
    return load_config(path, environment={}, options={"run_dir": "/run/here"})


@pytest.mark.parametrize(
    "endpoint",
    ["ipc:///run/kvcached/events.sock", "tcp://127.0.0.1:5557", "tcp://[::1]:5557", "tcp://localhost:5557"],
)
def test_events_may_be_published_on_this_machine(endpoint: str) -> None:
    """A path, and a port of the loopback interface, are endpoints."""
    assert EventsConfig(endpoint=endpoint).endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint",
    ["ipc://relative.sock", "ipc:///" + "x" * 120, "tcp://0.0.0.0:5557", "tcp://*:5557", "tcp://127.0.0.1", "x", ""],
)
def test_events_are_not_published_elsewhere(endpoint: str) -> None:
    """Ports that other machines reach, and what is no endpoint, are refused."""
    with pytest.raises(ValidationError, match="endpoint"):
        EventsConfig(endpoint=endpoint)


@pytest.mark.parametrize(
    ("events", "http", "tcp", "at", "other"),
    [
        ({"endpoint": PORT, "replay_endpoint": PORT}, "", "", "replay_endpoint", "endpoint"),
        ({"endpoint": PORT, "replay_endpoint": "tcp://localhost:5557"}, "", "", "replay_endpoint", "endpoint"),
        ({"endpoint": "ipc:///a/x", "replay_endpoint": "ipc:///a//x"}, "", "", "replay_endpoint", "endpoint"),
        ({"replay_endpoint": "ipc:///run/here/events.sock"}, "", "", "replay_endpoint", "endpoint"),
        ({"endpoint": "ipc:///run/here/replay.sock"}, "", "", "replay_endpoint", "endpoint"),
        ({"endpoint": PORT}, "127.0.0.1:5557", "", "endpoint", "http.listen"),
        ({"endpoint": "ipc:///x"}, "unix:/x", "", "endpoint", "http.listen"),
        ({"replay_endpoint": "tcp://localhost:5557"}, "[::1]:5557", "", "replay_endpoint", "http.listen"),
        ({"endpoint": PORT}, "", "127.0.0.1:5557", "endpoint", TCP_LISTEN),
        ({"endpoint": PORT}, "", "0.0.0.0:5557", "endpoint", TCP_LISTEN),
        ({"endpoint": "tcp://[::1]:5557"}, "", "[::]:5557", "endpoint", TCP_LISTEN),
    ],
)
def test_endpoint_has_a_place_of_its_own(
    events: dict[str, str], http: str, tcp: str, at: str, other: str, tmp_path: Path
) -> None:
    """Endpoints at one place, or where another table listens, are refused with what has the place."""
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, events, http, tcp)

    (problem,) = refused.value.problems
    assert problem.key == f"events.{at}"
    assert (problem.what, problem.fix) == (f"is the place of {other}, too", "give each its own")


@pytest.mark.parametrize("name", OWN_NAMES)
def test_no_socket_takes_the_place_of_a_file_of_the_daemon(name: str, tmp_path: Path) -> None:
    """Sockets, ledger, locks and logs in the run directory are the daemon's: nothing else is put there."""
    written = {
        "http.listen": ({}, f"unix:/run/here//{name}"),
        "events.endpoint": ({"endpoint": f"ipc:///run/here/{name}"}, ""),
        "events.replay_endpoint": ({"replay_endpoint": f"ipc:///run/./here/{name}"}, ""),
    }
    for key, (events, http) in written.items():
        with pytest.raises(ConfigError) as refused:
            load(tmp_path, events, http)
        (problem,) = refused.value.problems
        assert (problem.key, problem.what) == (key, "is a file of the daemon's own in run_dir")
    assert load(tmp_path, {"endpoint": f"ipc:///run/elsewhere/{name}"}, f"unix:/run/here/my-{name}").events is not None


@pytest.mark.parametrize(
    ("events", "http", "tcp"),
    [
        ({}, "unix:/run/here/http.sock", "10.0.0.5:5557"),
        ({"endpoint": PORT, "replay_endpoint": "tcp://[::1]:5557"}, "", ""),
        ({"endpoint": PORT, "replay_endpoint": "tcp://127.0.0.1:5558"}, "127.0.0.1:5559", "[::]:5557"),
        ({"endpoint": PORT}, "127.8.0.1:5557", "10.0.0.5:5557"),
    ],
)
def test_places_that_differ_are_taken(events: dict[str, str], http: str, tcp: str, tmp_path: Path) -> None:
    """One port at different addresses, and different ports, are different places."""
    assert load(tmp_path, events, http, tcp).events is not None


def test_first_table_whose_label_matches_counts() -> None:
    """Topics and tokens of a namespace are those of the first table with its label; others have the common topic."""
    tables = (
        EventsNamespace(label="llama-*", topics=("kv@a@llama", "kv@b@llama"), token_ids=True),
        EventsNamespace(label="llama-3", topics=("never",)),
        EventsNamespace(label="qwen", token_ids=True),
    )
    events = EventsConfig(topic="kv@node@", namespace=tables)

    assert events.topics("llama-3") == ("kv@a@llama", "kv@b@llama")
    assert [events.topics(label) for label in ("qwen", "other")] == [("kv@node@qwen",), ("kv@node@other",)]
    assert [events.may_tell_tokens(label) for label in ("llama-3", "qwen", "other")] == [True, True, False]
