"""Casts of weights that backward makes again: their copies are not kept from forward to backward.

AOTAutograd chooses the tensors to save for backward so that the fewest bytes move, and a low copy of a weight has half
the bytes of the weight. But the weight is in memory anyway, while copies of all weights take additional memory.
Recomputing the casts moves more bytes; if there is memory for the copies, use `weights="per_step"`, which casts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from passes.ops import ops


def recompute_weight_casts(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Mark casts of parameters in a graph of Dynamo's as torch's checkpointing does, so that backward recomputes
    them."""
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False):
        if isinstance(value, nn.Parameter):
            for user in node.users:
                if user.op.startswith("call") and ops.name(user) == "to":
                    user.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                    user.meta["ac_graph_id"] = 0
