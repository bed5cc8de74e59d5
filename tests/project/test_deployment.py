"""The files for Docker and Kubernetes name commands, paths, users and settings that daemon and image have."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from click.testing import CliRunner

from kvcached.cli.main import main
from kvcached.config.schema import Config, load_config
from tests.project.source_tree import ROOT

IMAGE = (ROOT / "Dockerfile").read_text()
IMAGE_VARIABLES = dict(re.findall(r"(KVCACHED_(?!COMPILE)[A-Z_]+)=(\S+)", IMAGE))
USER = 10001
FILES = ("compose.yaml", "kubernetes.yaml")


class Container(NamedTuple):
    """What both files say of a container, in the same words."""

    command: list[str]  #: arguments of the image's entry point
    mounts: dict[str, str]  #: where a volume is mounted, and which it is
    environment: dict[str, str]
    memory: str
    grace_s: int | None
    sees_the_host: bool


def composed() -> dict[str, Any]:
    text = (ROOT / "configs/compose.yaml").read_text()
    found: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))
    return found


def documents() -> Iterator[dict[str, Any]]:
    return iter(yaml.safe_load_all((ROOT / "configs/kubernetes.yaml").read_text()))


def pod_of(name: str) -> dict[str, Any]:
    (found,) = (each for each in documents() if each["metadata"]["name"] == name and each["kind"] != "ConfigMap")
    spec: dict[str, Any] = found["spec"]
    return spec["template"]["spec"] if found["kind"] == "DaemonSet" else spec


def of_compose(name: str) -> Container:
    service = composed()["services"][name]
    volumes = [each.split(":") for each in service.get("volumes", ())]
    return Container(
        service["command"],
        {place: volume for volume, place, *_ in volumes},
        service.get("environment", {}),
        service["mem_limit"],
        int(service["stop_grace_period"].removesuffix("s")) if "stop_grace_period" in service else None,
        service.get("pid") == "host",
    )


def of_kubernetes(name: str) -> Container:
    pod = pod_of({"keeper": "kvcached-keeper"}.get(name, name))
    (container,) = pod["containers"]
    paths = {each["name"]: each.get("hostPath", {}).get("path", each["name"]) for each in pod["volumes"]}
    return Container(
        container["args"],
        {each["mountPath"]: paths[each["name"]] for each in container["volumeMounts"]},
        {each["name"]: each["value"] for each in container.get("env", ())},
        container["resources"]["limits"]["memory"],
        pod.get("terminationGracePeriodSeconds"),
        pod.get("hostPID", False),
    )


def container(file: str, name: str) -> Container:
    return of_compose(name) if file == "compose.yaml" else of_kubernetes(name)


def configuration(file: str) -> str:
    if file == "compose.yaml":
        path = of_compose("kvcached").mounts[IMAGE_VARIABLES["KVCACHED_CONFIG"]]
        return (ROOT / "configs" / path).read_text()
    (found,) = (each for each in documents() if each["kind"] == "ConfigMap")
    return str(found["data"]["kvcached.toml"])


def parsed(command: list[str]) -> dict[str, Any]:
    """The options of a command line of `kvcached`, parsed by itself; wrong usage is an error."""
    name, *arguments = command
    with main.make_context("kvcached", [name]) as group:
        return main.commands[name].make_context(name, arguments, parent=group).params


@pytest.mark.parametrize("file", FILES)
def test_containers_run_commands_that_exist(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisor and keeper have one socket, in a directory that both have and no engine; all options parse."""
    monkeypatch.setenv("KVCACHED_CONFIG", str(tmp_path))
    daemon, keeper, engine = (container(file, name) for name in ("kvcached", "keeper", "vllm"))

    supervise = parsed(daemon.command)
    parsed(["serve", *supervise["serve_arguments"]])
    socket = parsed(keeper.command)["socket_path"]

    assert supervise["keeper"] == socket
    directory = str(socket.parent)
    assert keeper.mounts[directory] == daemon.mounts[directory]
    assert directory not in engine.mounts
    assert f"/run/kvcached-keeper {chr(92)}\n" in IMAGE


@pytest.mark.parametrize("file", FILES)
def test_engine_and_daemon_share_the_run_directory(file: str) -> None:
    """The run directory of the image is one volume in both containers, and the engine is told of it."""
    daemon, engine = container(file, "kvcached"), container(file, "vllm")
    run_dir = IMAGE_VARIABLES["KVCACHED_RUN_DIR"]

    assert daemon.mounts[run_dir] == engine.mounts[run_dir]
    assert engine.environment == {"KVCACHED_RUN_DIR": run_dir}
    assert daemon.environment == {}


@pytest.mark.parametrize("file", FILES)
def test_configuration_of_the_containers_is_right(file: str, tmp_path: Path) -> None:
    """The configuration inside the file passes `check-config` with the image's variables, and lets vLLM's user in."""
    path = tmp_path / "kvcached.toml"
    path.write_text(configuration(file))
    variables = IMAGE_VARIABLES | {"KVCACHED_CONFIG": str(path), "KVCACHED_RUN_DIR": str(tmp_path)}
    # What Kubernetes sets for a service of the daemon's name.
    variables |= {"KVCACHED_PORT": "tcp://10.0.0.1:9410", "KVCACHED_SERVICE_HOST": "10.0.0.1"}

    result = CliRunner(env=variables).invoke(main, ["check-config", "--json"])

    assert result.exit_code == 0, result.stderr
    found = load_config(path, environment=variables)
    assert [each.users for each in found.access.engine] == [("root",)]
    assert found.offload is not None
    assert json.loads(result.stdout)["config"]["run_dir"] == str(tmp_path)


def test_both_files_have_one_configuration() -> None:
    """What the ConfigMap says is what the file for Docker says, but for its first lines."""
    one, other = (tomllib.loads(configuration(file)) for file in FILES)

    assert one == other


@pytest.mark.parametrize("file", FILES)
def test_daemon_has_time_to_stop_and_sees_engines(file: str) -> None:
    """The container is killed later than the daemon gives up by itself, and its pid namespace outlives it."""
    daemon = container(file, "kvcached")

    assert daemon.grace_s is not None
    assert daemon.grace_s * 1000 > Config.model_fields["shutdown_deadline_ms"].default
    assert daemon.sees_the_host
    assert not container(file, "keeper").sees_the_host


@pytest.mark.parametrize("file", FILES)
def test_containers_have_room_for_the_pools(file: str, tmp_path: Path) -> None:
    """Daemon and engine may each use the host pool and a GiB more."""
    path = tmp_path / "kvcached.toml"
    path.write_text(configuration(file))
    host = load_config(path, environment={}).host
    assert host is not None
    units = {"m": 1 << 20, "g": 1 << 30, "Mi": 1 << 20, "Gi": 1 << 30}

    for name in ("kvcached", "vllm"):
        ((number, unit),) = re.findall(r"^(\d+)(\D+)$", container(file, name).memory)
        assert int(number) * units[unit] >= host.slabs * host.slab_bytes + (1 << 30)


@pytest.mark.parametrize("file", FILES)
def test_vllm_is_given_the_connector_of_the_documents(file: str) -> None:
    """The connector's configuration is that of docs/engines.md."""
    flag = "--kv-transfer-config="
    (given,) = (each.removeprefix(flag) for each in container(file, "vllm").command if each.startswith(flag))
    text = (ROOT / "docs/engines.md").read_text()
    (documented,) = re.findall(r"--kv-transfer-config \\\n\s+'(\{.*?\})'", text, re.DOTALL)

    assert json.loads(given) == json.loads(documented)


def test_probes_ask_the_daemon() -> None:
    """The readiness probe and the image's health check run `health`, and wait until it has given up by itself."""
    (daemon,) = pod_of("kvcached")["containers"]
    (check,) = re.findall(r"HEALTHCHECK .* CMD (\[.*\])", IMAGE)

    probe = daemon["readinessProbe"]
    assert probe["exec"]["command"] == ["kvcached", "health"] == json.loads(check)
    assert parsed(["health"])["deadline_ms"] < probe["timeoutSeconds"] * 1000
    assert composed()["services"]["keeper"]["healthcheck"] == {"disable": True}


def test_nothing_kills_a_daemon_that_serves() -> None:
    """There is no liveness probe, and the startup probe runs what also a daemon with an ill part answers with 0."""
    (daemon,) = pod_of("kvcached")["containers"]

    probe = daemon["startupProbe"]
    assert probe["exec"]["command"] == ["kvcached", "describe"]
    assert parsed(["describe"])["deadline_ms"] < probe["timeoutSeconds"] * 1000
    assert "livenessProbe" not in daemon


@pytest.mark.parametrize("name", ["kvcached", "kvcached-keeper"])
def test_pods_are_confined_and_own_their_directories(name: str) -> None:
    """Containers run as the image's user without privileges; before them, root makes the directories that user's."""
    pod = pod_of(name)
    (container,), (first,) = pod["containers"], pod["initContainers"]
    security = container["securityContext"]

    assert (security["runAsUser"], security["runAsNonRoot"], security["capabilities"]) == (
        USER,
        True,
        {"drop": ["ALL"]},
    )
    assert f"--uid {USER}" in IMAGE
    *_, directory = first["command"]
    assert [each["mountPath"] for each in first["volumeMounts"]] == [directory]
    assert directory in {each["mountPath"] for each in container["volumeMounts"]}
    assert f"--owner={USER}" in first["command"]
    mode = next(each.removeprefix("--mode=") for each in first["command"] if each.startswith("--mode="))
    assert f"--mode {mode} {directory}" in IMAGE


def test_services_are_confined() -> None:
    """Daemon and keeper have no network, no capabilities and a file system that is read only."""
    for name in ("kvcached", "keeper"):
        service = composed()["services"][name]
        assert (service["network_mode"], service["cap_drop"], service["read_only"]) == ("none", ["ALL"], True)
        assert service["security_opt"] == ["no-new-privileges:true"]
    assert composed()["services"]["kvcached"]["memswap_limit"] == composed()["services"]["kvcached"]["mem_limit"]


def test_engines_on_gpus_have_what_copies_on_them() -> None:
    """The images of vLLM are said to have the client with its extra `cuda`, as both engines ask for a GPU."""
    build = composed()["services"]["vllm"]["build"]["dockerfile_inline"]
    text = (ROOT / "configs/kubernetes.yaml").read_text()

    assert re.findall(r"pip install .*'/tmp/(.*)'", build) == ["kvcached_client[cuda]"]
    assert re.findall(r"pip install '\./(.*)'", text) == ["kvcached_client[cuda]"]


def test_keeper_and_daemon_come_to_the_same_nodes() -> None:
    """Those with GPUs among them, where an engine without a daemon waits."""
    keeper, daemon = pod_of("kvcached-keeper"), pod_of("kvcached")

    assert keeper["tolerations"] == daemon["tolerations"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in daemon["tolerations"]


def test_upgrade_leaves_the_keeper() -> None:
    """Neither a new manifest nor a new tag of the daemon's image replaces the keeper; the old Pod ends first."""
    sets = {each["metadata"]["name"]: each["spec"] for each in documents() if each["kind"] == "DaemonSet"}

    assert sets["kvcached-keeper"]["updateStrategy"] == {"type": "OnDelete"}
    assert sets["kvcached"]["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0
    text = (ROOT / "configs/compose.yaml").read_text()
    assert re.findall(r"image: (kvcached:.*)", text) == ["kvcached:0.1.0", "kvcached:${KVCACHED_TAG:-0.1.0}"]


def test_documented_restarts_name_what_the_files_have() -> None:
    """What applies a changed configuration names the service and the DaemonSet that mount it."""
    text = (ROOT / "docs/deployment.md").read_text()
    (service,) = re.findall(r"compose --file configs/compose.yaml restart (\w+)", text)
    (name,) = re.findall(r"kubectl rollout restart daemonset/(\w+)", text)

    assert "./containers.toml:/etc/kvcached/kvcached.toml:ro" in composed()["services"][service]["volumes"]
    assert {"name": "config", "configMap": {"name": "kvcached"}} in pod_of(name)["volumes"]


def test_documented_upgrades_name_what_the_files_have() -> None:
    """The commands for Docker and Kubernetes name services, containers and variables of the files."""
    text = (ROOT / "docs/upgrade.md").read_text()
    (daemon,) = pod_of("kvcached")["containers"]

    assert "up --detach --no-deps kvcached`" in text
    assert "kvcached" in composed()["services"]
    assert f"daemonset/kvcached {daemon['name']}=kvcached:NEW" in text
    assert re.findall(r"(\w+)=NEW", text) == ["KVCACHED_TAG"]
