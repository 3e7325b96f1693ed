"""The compiler as a graph pass of torchtitan's GraphTrainer, which traces forward, loss and backward as one graph.

Its protocol, as of torchtitan 0.3: a pipeline is a function `(traced_result, config) -> passes` that
`torchtitan.experiments.graph_trainer.registry.register_pass_pipeline(name)` registers, and a pass is a function
`(gm, example_inputs, **kwargs) -> gm`. Weights and inputs are placeholders, and gradients are outputs.

In such a graph autograd has split the ops that torch.autocast knows. What is left of one that it runs in FP32 stays in
FP32, forward and backward; so does the backward of a softmax, in which the trace has written down its dtype. What is
left of attention runs low, but for the statistics that its forward keeps for its backward. All other nodes follow the
rules, the backward of a product as a product; those without a rule are listed in the plan.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from passes.contract.errors import FxampError
from passes.contract.policy import Policy
from passes.ops import ops
from passes.ops.rules import FP32, LOW, RULES, is_registered, lookup, row_named

from ..convert import convert


def graph_pass(gm: GraphModule, example_inputs: Any = (), *, policy: Policy | str = "O1", **_: Any) -> GraphModule:
    """Convert a traced step: forward, loss and backward.

    Args:
        gm: The graph, whose nodes have fake values.
        example_inputs: Not needed: it is there since GraphTrainer passes it.
        policy: A level, a policy string or a Policy. Without a device, that of the first input.

    Raises:
        FxampError: As `fxamp.convert`.
    """
    asked = Policy.of(policy)
    if asked.level.rounds:
        asked = replace(asked, ops=tuple({**_split(gm, asked), **dict(asked.ops)}.items()))
    made: GraphModule = convert(gm, policy=asked)
    return made


def _split(gm: GraphModule, policy: Policy) -> dict[str, str]:
    """Return overrides for the ops of a graph that are what is left of an op that autocast runs low, or in FP32."""
    first = next((n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")), None)
    device = policy.device or (first.device.type if isinstance(first, torch.Tensor) else "cpu")
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    names = {ops.name(n) for n in calls}
    losses = {ops.name(user) for n in calls if ops.name(n) == "_log_softmax" for user in n.users}
    wide, low = set[str](), set[str]()
    if lookup("scaled_dot_product_attention", device)[1] == LOW:
        low = {name for name in names if name.startswith("_scaled_dot_product_") and row_named(name).known}
    for row in RULES.values():
        entropy = row.name == "log_softmax" and any("nll_loss" in name for name in losses)
        fp32 = bool(row.leaves) and (entropy or lookup(row.name, device)[1] == FP32)
        wide |= {name for name in row.leaves if fp32 or row_named(name).names_dtype}
    if not policy.level.is_autocasts or policy.ops or policy.modules:  # then operands may differ, which kernels refuse
        wide |= {name for name in names - low if name.endswith("_backward") and not is_registered(name)}
    return {**dict.fromkeys(sorted(low), "low"), **dict.fromkeys(sorted(wide & names), "fp32")}


def register(name: str = "fxamp", policy: Policy | str = "O1") -> Callable[..., Any]:
    """Register a pipeline with GraphTrainer: this pass, then torchtitan's own.

    Args:
        name: The name that `--compile.pass_pipeline` takes.
        policy: As `graph_pass` takes it.

    Raises:
        FxampError: torchtitan is not installed, or has no GraphTrainer.
        PolicyError: The policy is wrong.
    """
    asked = Policy.of(policy)
    try:
        registry = importlib.import_module("torchtitan.experiments.graph_trainer.registry")
        theirs = importlib.import_module("torchtitan.experiments.graph_trainer.passes")
    except ImportError as e:
        raise FxampError("GraphTrainer was not found: install torchtitan 0.3 or newer") from e

    def pipeline(traced_result: Any, config: Any, **more: Any) -> list[Callable[..., Any]]:
        passes = theirs.construct_default_graph_passes(traced_result, config, **more)
        return [functools.partial(graph_pass, policy=asked), *passes]

    registry.register_pass_pipeline(name)(pipeline)
    return pipeline
