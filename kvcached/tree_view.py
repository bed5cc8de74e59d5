"""The index as a tree of lines, one for each run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from kvcached_client.protocol import TreeNode

#: Hex digits of a namespace that tell it from others, as in `kvcached stats`.
_NAMESPACE_DIGITS = 16
#: More than the longest line has: what a terminal does with it is the terminal's business.
_WIDTH = 10_000


def print_tree(nodes: Sequence[TreeNode]) -> None:
    """Print runs that come in preorder to stdout. Lines are never cut or wrapped, however narrow the terminal is."""
    console = Console(highlight=False, width=_WIDTH)
    for root in _trees(nodes):
        console.print(root)


def _trees(nodes: Sequence[TreeNode]) -> list[Tree]:
    roots: list[Tree] = []
    path: list[tuple[TreeNode, Tree]] = []  # from a root to where the next node may hang
    for node in nodes:
        while path and path[-1][0].level >= node.level:
            _close(*path.pop())
        if path:
            branch = path[-1][1].add(_label(node))
        else:
            branch = Tree(_label(node))
            roots.append(branch)
        path.append((node, branch))
    while path:
        _close(*path.pop())
    return roots


def _close(node: TreeNode, branch: Tree) -> None:
    """All children of a node that are shown hang on it: say how many are not."""
    if node.hidden:
        branch.add(Text(f"+ {node.hidden} more"))


def _label(node: TreeNode) -> Text:
    """``[0, 740)  a 740/740  host 512/740  pins 2  <key>``; of a root its namespace and the pools of it."""
    if not node.level:
        return Text(f"namespace {node.key.hex()[:_NAMESPACE_DIGITS]}: {', '.join(node.tiers)}")
    marks = [
        f"[{node.start}, {node.start + node.blocks})",
        *(f"{tier} {held}/{node.blocks}" for tier, held in node.tiers.items()),
        *([f"loading {node.loading}"] if node.loading else []),
        *([f"pins {node.pins}"] if node.pins else []),
        node.key.hex(),
    ]
    return Text("  ".join(marks))
