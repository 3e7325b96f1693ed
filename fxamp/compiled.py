"""Which graphs were converted for which model, found again by the parameters that they read.

Dynamo hands a backend flat graphs, and no model. The parameters among their inputs are the model's own.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from passes.errors import CaptureError
from passes.plan import Decision, Plan
from passes.policy import Policy

from .capture_jit import parameter_path


@dataclass(frozen=True)
class Converted:
    """One converted graph, what was decided, and the paths of its parameters in the module captured, by identity."""

    graph: GraphModule
    plan: Plan
    paths: dict[int, str]
    broke: str  # where and why Dynamo ended the graph early, "" when it did not


_BY_PARAMETER: Any = WeakIdKeyDictionary()
_ASKED: weakref.WeakKeyDictionary[nn.Module, Policy] = weakref.WeakKeyDictionary()


def announce(module: nn.Module, policy: Policy) -> None:
    """Note what a compiled module asks for: several over one model may ask for different things."""
    _ASKED[module] = policy


def record(gm: GraphModule, plan: Plan, example_inputs: Iterable[Any]) -> None:
    """Keep a converted graph for as long as the parameters that it reads."""
    placeholders = (n for n in gm.graph.nodes if n.op == "placeholder")
    parameters = [
        (t, parameter_path(n))
        for n, t in zip(placeholders, example_inputs, strict=False)
        if isinstance(t, nn.Parameter)
    ]
    copied = Graph()  # inner backends change what they are given
    copied.output(copied.graph_copy(gm.graph, {}))
    entry = Converted(GraphModule(gm, copied), plan, {id(t): path for t, path in parameters}, _break_of(gm))
    for parameter, _ in parameters:
        _BY_PARAMETER.setdefault(parameter, []).append(entry)


def _break_of(gm: GraphModule) -> str:
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return ""
    stack = getattr(reason, "user_stack", None)
    where = f"{os.path.basename(stack[-1].filename)}:{stack[-1].lineno}" if stack else "an unknown place"
    return f"{where} ({str(reason.reason).splitlines()[0]})"


def entries(module: nn.Module) -> list[Converted]:
    """Return what was converted for a compiled module, in order.

    Raises:
        CaptureError: nothing was.
    """
    found: dict[int, Converted] = {}
    for parameter in module.parameters():
        for entry in _BY_PARAMETER.get(parameter, ()):
            found[id(entry)] = entry
    asked = _ASKED.get(module)
    out = [entry for entry in found.values() if asked is None or _carries_out(entry.plan.policy, asked)]
    if not out:
        raise CaptureError(_nothing(module))
    return out


def _carries_out(policy: Policy, asked: Policy) -> bool:
    """Say whether a policy is the one asked for: one model can be compiled for two."""
    return policy == replace(asked, device=asked.device or policy.device, dtype=asked.dtype or policy.dtype)


def is_compiled(module: nn.Module) -> bool:
    """Say whether this is what torch.compile returned, or a module compiled in place."""
    return _in_place(module) or isinstance(module, torch._dynamo.OptimizedModule)


def _in_place(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _nothing(module: nn.Module) -> str:
    name = type(module).__name__
    if _in_place(module) and type(module).__module__.startswith("torch.nn"):
        return (
            f"nothing was captured: torch's .compile() on a class of torch.nn itself, such as {name}, captures "
            "nothing. Use compiled = torch.compile(model, backend='fxamp'), or fxamp.compile(model)."
        )
    if is_compiled(module):
        return (
            f"nothing was captured yet: {name} is captured at its first call. If it has been called, torch.compile "
            "left all of it to Python; TORCH_LOGS=graph_breaks says where."
        )
    return f"{name} was not converted by fxamp: pass what fxamp.convert or fxamp.compile returned."


def plan_of(module: nn.Module) -> Plan:
    """Return one plan over all graphs that were converted for a module, with module paths from its root."""
    found = entries(module)
    paths = {id(p): name.removeprefix("_orig_mod.") for name, p in module.named_parameters()}
    decisions: list[Decision] = []
    for entry in found:
        first = max((d.graph for d in decisions), default=-1) + 1
        prefix = _prefix(entry.paths, paths)
        decisions += [_moved(d, prefix, first) for d in entry.plan.decisions]
    plans = [e.plan for e in found]
    return replace(
        plans[0],
        decisions=tuple(decisions),
        notes=(*dict.fromkeys(n for p in plans for n in p.notes), *_coverage(module, found)),
        inserted_casts=sum(p.inserted_casts for p in plans),
        casts=sum(p.casts for p in plans),
    )


def _coverage(module: nn.Module, found: list[Converted]) -> list[str]:
    """Say how much of a model is in its graphs, where it is not all in one."""
    inside = {i for entry in found for i in entry.paths}
    named = [(name.removeprefix("_orig_mod."), p) for name, p in module.named_parameters()]
    outside = [name for name, p in named if id(p) not in inside]
    if not outside and not any(entry.broke for entry in found):
        return []
    held = sum(p.numel() for _, p in named if id(p) in inside)
    share = held / max(sum(p.numel() for _, p in named), 1)
    ops = sum(len(entry.plan.decisions) for entry in found)
    left = f"; outside: {', '.join(outside[:5])}{' and more' if len(outside) > 5 else ''}" if outside else ""
    return [
        f"{len(found)} graphs of {ops} floating-point ops hold {len(named) - len(outside)} of {len(named)} parameters "
        f"({share:.0%} of their elements){left}; what runs between graphs runs as it is",
        *dict.fromkeys(f"graph break at {entry.broke}" for entry in found if entry.broke),
    ]


def _prefix(captured: dict[int, str], paths: dict[int, str]) -> str:
    """Return where in a model the module lies whose forward was captured: "encoder." where its "fc" is "encoder.fc"."""
    found = [
        paths[i].removesuffix(path)
        for i, path in captured.items()
        if path and (paths.get(i) == path or paths.get(i, "").endswith(f".{path}"))
    ]
    return max(set(found), key=found.count, default="")


def _moved(decision: Decision, prefix: str, first: int) -> Decision:
    return replace(
        decision,
        graph=decision.graph + first,
        key=prefix + decision.key if decision.module_path else f"{prefix.removesuffix('.')}{decision.key}",
        module_path=f"{prefix}{decision.module_path}".removesuffix("."),
        causes=tuple(prefix + c if not c.startswith("/") else prefix.removesuffix(".") + c for c in decision.causes),
    )
