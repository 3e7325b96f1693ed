"""A report as two files for Google's Model Explorer: the graph, and data for its nodes, which colours them.

`model-explorer graph.json --node_data_paths graph.node_data.json` opens both: a folded module then shows how much of it
runs in which dtype.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..record.colours import PALETTE, style_of
from ..record.record import NodeRecord


def to_model_explorer(nodes: Sequence[NodeRecord], model: str) -> tuple[str, str]:
    """Return the graph and the data of its nodes, both as JSON."""
    numbers = sorted({node.graph for node in nodes})
    graphs = [(f"graph {n}", [node for node in nodes if node.graph == n]) for n in numbers]
    collection = {"label": model, "graphs": [_graph(name, found) for name, found in graphs]}
    data = {name: _data(found) for name, found in graphs}
    return _text(collection), _text(data)


def _graph(name: str, nodes: Sequence[NodeRecord]) -> dict[str, Any]:
    given = dict.fromkeys(r.value for node in nodes for r in node.reads if r.kind != "node")
    keys = {node.key for node in nodes}
    return {
        "id": name,
        "nodes": [
            *({"id": f"value {value}", "label": value, "namespace": "values"} for value in given),
            *(_node(node, keys) for node in nodes),
        ],
    }


def _node(node: NodeRecord, keys: set[str]) -> dict[str, Any]:
    reads = [(f"value {r.value}" if r.kind != "node" else r.value, r) for r in node.reads]
    reads = [(start, r) for start, r in reads if r.kind != "node" or start in keys]
    return {
        "id": node.key,
        "label": node.op,
        "namespace": node.module.replace("/", "|").replace(".", "/"),  # its separator is "/"
        "attrs": [{"key": key, "value": value} for key, value in _attributes(node)],
        "incomingEdges": [
            {"sourceNodeId": start, "sourceNodeOutputId": "0", "targetNodeInputId": str(at)}
            for at, (start, _) in enumerate(reads)
        ],
        "inputsMetadata": [
            {"id": str(at), "attrs": [{"key": "cast", "value": f"to {r.cast}"}]}
            for at, (_, r) in enumerate(reads)
            if r.cast
        ],
        "outputsMetadata": [
            {"id": str(at), "attrs": [{"key": "shape", "value": f"{dtype}[{', '.join(shape)}]"}]}
            for at, (dtype, shape) in enumerate(zip(node.dtypes, node.shapes, strict=False))
        ],
    }


def _attributes(node: NodeRecord) -> Iterator[tuple[str, str]]:
    yield "runs in", node.colour
    yield "under autocast", node.autocast
    yield "why", f"{node.reason_code}: {node.reason}"
    if node.causes:
        yield "because of", ", ".join(node.causes)
    if node.file:
        yield "line", f"{node.file}:{node.line}: {node.code}"


def _data(nodes: Sequence[NodeRecord]) -> dict[str, Any]:
    results = {
        node.key: {
            "value": node.colour,
            "bgColor": PALETTE[style_of(node.colour)],
        }
        for node in nodes
    }
    return {"name": "precision", "results": results, "showExpandedSummaryOnGroupNode": True}


def _text(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
