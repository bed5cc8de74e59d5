from __future__ import annotations

import ast
import logging
import tomllib
from collections.abc import Iterator
from itertools import chain

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

from tests.project.source_tree import ROOT, imported_packages, modules

SHIPPED = ("kvcached", "kvcached_client")
#: Import names whose distribution is called otherwise.
#: The engine that a package is loaded into, and what comes with it: nothing to declare, for who installs it has that.
HOSTS = {
    "kvcached_client/vllm/": {"vllm"},
    "kvcached_client/sglang/": {"sglang"},
    "kvcached_client/engines/weights.py": {"huggingface_hub"},
}
DISTRIBUTIONS = {"nacl": "PyNaCl", "zmq": "pyzmq", "kvcached_client": "kvcached-client", "pydantic_core": "pydantic"}


def test_imports_keep_the_layers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every import contract of pyproject.toml is kept."""
    monkeypatch.chdir(ROOT)
    loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    silent = {logger for logger in loggers if logger.disabled}

    status = lint_imports(config_filename="pyproject.toml", no_cache=True)

    for logger in loggers:  # it turns off every logger that is there
        logger.disabled = logger in silent
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_every_module_is_in_a_layer() -> None:
    """Each module of the daemon is named in a contract of layers, itself or one of its packages."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer for contract in contracts if contract["id"].endswith("-layers") for layer in contract["layers"]]
    named = {name.strip() for layer in layers for name in layer.split("|")}
    for package in ("kvcached.core", "kvcached.storage"):  # their modules have contracts of their own
        assert package in named
    found = {path.removesuffix(".py").replace("/", ".") for path, _ in modules("kvcached") if "__" not in path}
    is_alone = {name for name in named if not name.startswith(("kvcached.core", "kvcached.storage"))}
    covered = {name for name in found if name in named or any(name.startswith(f"{layer}.") for layer in is_alone)}
    assert found - covered == set()


def test_example_engine_uses_the_public_client_only() -> None:
    """The example imports names of `kvcached_client`, no module of the daemon, and no private module of the client."""
    for path, tree in modules("examples/llama_engine"):
        assert "kvcached" not in imported_packages(tree), path


@pytest.mark.parametrize(
    ("folder", "project"), [("kvcached", "pyproject.toml"), ("kvcached_client", "kvcached_client/pyproject.toml")]
)
def test_third_party_imports_are_declared(folder: str, project: str) -> None:
    """Each package that shipped code imports is a dependency of its distribution or of one of its extras."""
    declared = tomllib.loads((ROOT / project).read_text())["project"]
    requirements = [declared["dependencies"], *declared["optional-dependencies"].values()]
    names = {requirement.split(">")[0].split("=")[0].split("~")[0].strip() for requirement in chain(*requirements)}

    for path_of_module, tree in modules(folder):
        host = next((brought for place, brought in HOSTS.items() if str(path_of_module).startswith(place)), set())
        for package in imported_packages(tree) - {folder} - host:
            assert DISTRIBUTIONS.get(package, package) in names, f"{path_of_module} imports {package}"


def test_dependencies_are_used() -> None:
    """Each dependency of the daemon is imported by it."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    imported = set.union(*(imported_packages(tree) for _, tree in modules("kvcached")))
    used = {DISTRIBUTIONS.get(name, name) for name in imported}

    assert {requirement.split(">")[0].split("=")[0] for requirement in declared} <= used


def forbidden_calls(tree: ast.Module) -> Iterator[str]:
    """Ways to run what a peer sent, to open a shell, or to wait by sleeping."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in {"eval", "exec", "os.system", "os.popen", "time.sleep", "sleep", "torch.load"}:
            yield f"line {node.lineno}: {name}"
        if name.endswith((".recv_pyobj", ".send_pyobj")):
            yield f"line {node.lineno}: {name}"
        if any(keyword.arg == "shell" and ast.unparse(keyword.value) != "False" for keyword in node.keywords):
            yield f"line {node.lineno}: {name}(shell=…)"


@pytest.mark.parametrize(
    "source",
    ["time.sleep(1)", "run('x', shell=True)", "s.recv_pyobj()", "eval('1')", "f(shell=flag)", "os.system('x')"],
)
def test_forbidden_calls_are_found(source: str) -> None:
    """The scan sees what it is there for."""
    assert list(forbidden_calls(ast.parse(source)))


def test_shipped_code_has_no_forbidden_calls() -> None:
    """Nothing shipped unpickles, opens a shell, or sleeps to wait for something."""
    found = {path: list(forbidden_calls(tree)) for path, tree in modules(*SHIPPED)}

    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.full
def test_every_test_has_its_sentence() -> None:
    """A test's docstring is one sentence: the one that the test proves."""
    missing = []
    for path, tree in modules("tests"):
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for node in chain(tree.body, *(each.body for each in classes)):  # where pytest looks for tests
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                sentence = ast.get_docstring(node) or ""
                if not sentence.strip().endswith((".", "!", "?")):
                    missing.append(f"{path}:{node.lineno} {node.name}")

    assert missing == []


def test_files_are_short() -> None:
    """No shipped file has more than 500 lines: what does not fit is two subjects."""
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path, _ in modules(*SHIPPED)}

    assert {path: length for path, length in lengths.items() if length > 500} == {}
