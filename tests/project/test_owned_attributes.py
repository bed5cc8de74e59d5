"""The core's objects are whole when they are made: each is changed by its own module only."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.project.source_tree import modules

#: Where others may assign to an attribute, and which: a call for each of these would be felt.
EXCEPTIONS = {
    # Runs and segments are the tree's nodes, written in its innermost loops.
    "kvcached/core/index": {
        "above", "backed", "children", "clock", "hit_end", "keys", "last_used", "length", "locked_children", "parent",
        "protected", "resident_children", "segments", "solid", "start",
    },
    # Every touch of a tail files it anew.
    "kvcached/core/eviction": {"filed_priority", "moved_down", "queued"},
    # Hundreds of thousands of runs are made at once, in a tree that nobody has seen yet.
    "kvcached/core/restart/restore.py": {"children", "clock", "resident_children", "run_count"},
}  # fmt: skip


def own_attributes(tree: ast.Module) -> set[str]:
    """Attributes of a module's own classes: fields, and what methods assign to themselves."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
            names |= {field.id for field in fields if isinstance(field, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
    return names


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def foreign_assignments(tree: ast.Module, allowed: set[str]) -> Iterator[str]:
    """Assignments to attributes of objects of other modules, but for the allowed ones."""
    own = own_attributes(tree) | allowed
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            if not _is_self(node.value) and node.attr not in own:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and not _is_self(node.args[0]):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def allowed_in(path: str) -> set[str]:
    """What the exceptions allow in a file."""
    return {name for place, names in EXCEPTIONS.items() if path.startswith(place) for name in names}


@pytest.mark.parametrize(
    "source",
    [
        "pool.paused = True",
        "a.b.count += 1",
        "x.left, x.right = 1, 2",
        "del tree.root",
        "setattr(pool, 'paused', True)",
    ],
)
def test_foreign_assignments_are_found(source: str) -> None:
    """The scan sees what it is there for."""
    assert list(foreign_assignments(ast.parse(source), set()))


def test_attributes_of_the_core_are_assigned_by_their_own_module() -> None:
    """No attribute of an object of the core is assigned by another module, but for the nodes of the index."""
    found = {path: list(foreign_assignments(tree, allowed_in(str(path)))) for path, tree in modules("kvcached/core")}

    assert {path: lines for path, lines in found.items() if lines} == {}


def test_every_exception_is_needed() -> None:
    """Each exception stands for an assignment that is there."""
    for place, names in EXCEPTIONS.items():
        trees = [tree for path, tree in modules("kvcached/core") if str(path).startswith(place)]
        used = {
            node.attr
            for tree in trees
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not _is_self(node.value)
            if node.attr not in own_attributes(tree)
        }
        assert names - used == set(), place
