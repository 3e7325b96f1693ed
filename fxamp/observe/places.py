"""How the nodes of an emitted graph are called: one key for a node, whoever asks, and what is the same code.

A node of the author's has the key of its decision: module path, op and ordinal. A cast of fxamp's has that of the first
node that reads its value, since it is made for that.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, Node

from passes.graph.notes import is_ours
from passes.graph.values import keys, numbered
from passes.ops.rules import row_of

OUTPUT = "(output)"  # the key of a cast that nothing but the output reads


def readers(node: Node) -> Iterator[Node]:
    """Yield the author's nodes that read a value, by casts of fxamp too."""
    for user in node.users:
        if is_ours(user):
            yield from readers(user)
        elif user.op != "output":
            yield user


def author_keys(graph: Graph) -> dict[Node, str]:
    """Return the key of every call of the author's."""
    return keys(n for n in graph.nodes if not is_ours(n))


def node_keys(graph: Graph) -> dict[Node, str]:
    """Return the key of every call of an emitted graph."""
    author = author_keys(graph)
    calls = (n for n in graph.nodes if n.op.startswith("call"))
    return {n: next((author[r] for r in (n, *readers(n)) if r in author), OUTPUT) for n in calls}


def unique_keys(graph: Graph) -> dict[Node, str]:
    """Return a key for every node that no other has: for a call of the author's that of its decision."""
    author = author_keys(graph)
    found = numbered([*author, *(n for n in graph.nodes if n not in author)])
    return {n: found[n] for n in graph.nodes}


def wiring(graph: Graph) -> dict[str, tuple[tuple[str, ...], str]]:
    """Return by key of each call of the author's which calls read its value, and what numbers it computes with.

    Sizes are none of these, so that graphs of one code, captured for batches of several sizes, are the same.
    """
    author = author_keys(graph)
    return {
        key: (tuple(dict.fromkeys(author[r] for r in readers(node) if r in author)), _numbers(node))
        for node, key in author.items()
    }


def _numbers(node: Node) -> str:
    if "arithmetic" not in row_of(node).in_norm:
        return ""
    return ", ".join(str(float(a)) for a in node.args if isinstance(a, (int, float)) and not isinstance(a, bool))
