"""Choose nodes by module, op, dtype and reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from passes.contract.errors import PolicyError
from passes.contract.policy import nearest

from ..record.record import NodeRecord, Record


def chosen(
    record: Record,
    *,
    modules: Sequence[str] = (),
    ops: Sequence[str] = (),
    colours: Sequence[str] = (),
    reasons: Sequence[str] = (),
) -> list[NodeRecord]:
    """Return the nodes that pass all filters: by module (or one below it), op, colour and reason code.

    Raises:
        PolicyError: a filter matches no node, or no node passes all of them.
    """
    nodes = list(record.nodes)
    asked = [
        ("module", modules, _modules), ("op", ops, lambda n: (n.op,)), ("colour", colours, lambda n: (n.colour,)),
        ("reason", reasons, lambda n: (n.reason_code,)),
    ]  # fmt: skip
    for name, values, names_of in asked:
        _refuse_unknown(name, values, record.nodes, names_of)
        nodes = [n for n in nodes if not values or not set(values).isdisjoint(names_of(n))]
    if not nodes and record.nodes:
        given = ", ".join(f"{name} {' or '.join(values)}" for name, values, _ in asked if values)
        raise PolicyError(f"no node passes all filters at once: {given}")
    return nodes


def _refuse_unknown(
    name: str, values: Sequence[str], nodes: Iterable[NodeRecord], names_of: Callable[[NodeRecord], Sequence[str]]
) -> None:
    known = list(dict.fromkeys(n for node in nodes for n in names_of(node) if n)) if values else []
    for value in values:
        if value not in known:
            raise PolicyError(f"no node has the {name} {value!r}{nearest(value, known)}")


def _modules(node: NodeRecord) -> list[str]:
    """Return the path of the module of a node, and those of all modules round it."""
    parts = node.module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
