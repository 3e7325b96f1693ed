"""A report as two files for Google's Model Explorer: the graph, and data for its nodes, which colours them.

`model-explorer graph.json --node_data_paths graph.node_data.json` opens both: a folded module then shows how much of it
runs in which dtype.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..record.record import PALETTE, NodeRecord, style_of


def to_model_explorer(nodes: Sequence[NodeRecord], model: str) -> tuple[str, str]:
    """Return the graph and the data of its nodes, both as JSON."""
    graphs, data = [], {}
    for number in sorted({node.graph for node in nodes}):
        own = [node for node in nodes if node.graph == number]
        keys, name = {node.key for node in own}, f"graph {number}"
        given = dict.fromkeys(read.value for node in own for read in node.reads if read.kind != "node")
        inputs = [{"id": f"value {value}", "label": value, "namespace": "values"} for value in given]
        graphs.append({"id": name, "nodes": [*inputs, *(_node(node, keys) for node in own)]})
        results = {n.key: {"value": n.colour, "bgColor": PALETTE[style_of(n.colour)]} for n in own}
        data[name] = {"name": "precision", "results": results, "showExpandedSummaryOnGroupNode": True}
    return _text({"label": model, "graphs": graphs}), _text(data)


def _node(node: NodeRecord, keys: set[str]) -> dict[str, Any]:
    named = [(r.value if r.kind == "node" else f"value {r.value}", r) for r in node.reads]
    reads = [(start, r) for start, r in named if r.kind != "node" or start in keys]
    attributes = {
        "runs in": node.colour, "under autocast": node.autocast, "why": f"{node.reason_code}: {node.reason}",
        "because of": ", ".join(node.causes), "line": f"{node.file}:{node.line}: {node.code}" if node.file else "",
    }  # fmt: skip
    return {
        "id": node.key,
        "label": node.op,
        "namespace": node.module.replace("/", "|").replace(".", "/"),  # its separator is "/"
        "attrs": [{"key": key, "value": value} for key, value in attributes.items() if value],
        "incomingEdges": [
            {"sourceNodeId": start, "sourceNodeOutputId": "0", "targetNodeInputId": str(at)}
            for at, (start, _) in enumerate(reads)
        ],
        "inputsMetadata": [
            {"id": str(at), "attrs": [{"key": "cast", "value": f"to {r.cast}"}]}
            for at, (_, r) in enumerate(reads) if r.cast
        ],
        "outputsMetadata": [
            {"id": str(at), "attrs": [{"key": "shape", "value": f"{dtype}[{', '.join(shape)}]"}]}
            for at, (dtype, shape) in enumerate(zip(node.dtypes, node.shapes, strict=False))
        ],
    }  # fmt: skip


def _text(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
