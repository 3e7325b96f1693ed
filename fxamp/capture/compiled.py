"""The registry of converted graphs of Dynamo, looked up by compiled module or by identity of parameters.

Dynamo hands a backend flat graphs without the model. The parameters among their inputs identify the model. If a graph
also serves another model with the same code, the first call of that model reveals it.
"""

from __future__ import annotations

import copy
import itertools
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils.weak import WeakIdKeyDictionary

from passes._torch import NUMBERS, FakeTensor, pytree
from passes.contract.costs import CostModel
from passes.contract.errors import CaptureError, PolicyError
from passes.contract.plan import Decision, Plan, sums
from passes.contract.policy import module_override
from passes.graph.notes import is_inserted
from passes.graph.values import dtypes_of
from passes.ops import ops
from passes.ops.numbers import value_of
from passes.runtime.tracing import RuntimeTracer

from .._torch import codegen_of, compiled_call, is_number_input, original_of
from .capture_jit import attribute_of, parameter_path
from .recompile_limit import anywhere, reached
from .scope import Scope
from .scope import scope as current_scope

if TYPE_CHECKING:
    from .described import Described


@dataclass(frozen=True)
class Converted:
    """One converted graph, what was decided, and the parameters that it reads.

    Attributes:
        graph: a copy, since inner backends change their graphs.
        plan: what was decided, with module paths from the root if that is known.
        parameters: what it reads, not kept alive, and their paths: from the root, else from the module captured.
        places: which inputs of the graph they are.
        broke: where and why Dynamo ended the graph early, "" when it did not.
        autocast: it was captured under autocast.
        read: the places of the outputs from which others are computed.
        described: the graph before the passes, if it is kept.
    """

    graph: GraphModule
    plan: Plan
    parameters: tuple[tuple[weakref.ref[Any], str], ...] = ()
    places: tuple[int, ...] = ()
    broke: str = ""
    autocast: bool = False
    read: tuple[int, ...] = ()
    described: Described | None = None

    def under(self, costs: CostModel | None) -> Plan:
        """Return what is decided under other costs; None for the plan that is carried out."""
        return self.plan if costs is None or self.described is None else self.described.plan(costs)

    @property
    def paths(self) -> dict[int, str]:
        """Return the paths of the parameters that are still there, by identity."""
        return {id(p): path for held, path in self.parameters if (p := held()) is not None}

    @property
    def signature(self) -> Any:
        """Return a key that is equal for graphs of one code, and the same decisions, whatever its sizes and numbers."""
        return self.code, self.colours

    @property
    def computed(self) -> Any:
        """Return a key that is equal for graphs that compute the same, wherever their code stands."""
        return self.written, self.colours

    @property
    def code(self) -> Any:
        """Return a key that is equal for graphs of one code, whatever its sizes and numbers, and what was decided."""
        return self.written, tuple(d.source for d in self.plan.decisions)

    @property
    def colours(self) -> tuple[str, ...]:
        """Return what was decided, node by node."""
        return tuple(d.colour for d in self.plan.decisions)

    @property
    def written(self) -> Any:
        """Return a key that is equal for graphs of the same calls, wherever their code stands."""
        nodes = self.graph.graph.nodes
        inputs = [n for n in nodes if n.op == "placeholder" and _is_made(n) and not is_number_input(n)]
        given = tuple(str(dtypes_of(n.meta.get("val"))) for n in inputs)
        calls = [n for n in nodes if n.op.startswith("call") and not is_inserted(n)]
        made = [(n, n.target if n.op == "call_method" else ops.name(n)) for n in calls if _is_made(n)]
        written = tuple((name, str(map_aggregate((n.args, dict(n.kwargs)), _unsized))) for n, name in made)
        return self.broke, given, tuple((d.graph, d.key, d.op) for d in self.plan.decisions), written


def _is_made(node: Node) -> bool:
    """Say whether a value is a tensor, or holds one. A size is a value only if it is dynamic."""
    return any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(node.meta.get("val")))


def _unsized(argument: Any) -> Any:
    """Return an argument without values, sizes and numbers: a number in one graph may be a node in another."""
    if argument is None or isinstance(argument, (bool, str, torch.dtype)):
        return argument
    if isinstance(value_of(argument), NUMBERS):
        return "number"
    return "tensor" if isinstance(argument, Node) else str(argument)


_KEPT: Any = WeakIdKeyDictionary()  # the graphs of a compiled module, and those that read a parameter


def runner_of(module: object) -> Any:
    """Return what runs the calls of a view; None for anything else."""
    return getattr(type(module), "_fxamp_runner", None)


def converted_of(
    gm: GraphModule, plan: Plan, example_inputs: Sequence[Any], scope: Scope | None, *, autocast: bool
) -> Converted:
    """Return what is kept of a converted graph."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    places = tuple(i for i, value in enumerate(example_inputs) if isinstance(value, nn.Parameter))
    known = scope.parameters if scope is not None else {}
    paths = [known.get(id(example_inputs[i])) or parameter_path(placeholders[i]) for i in places]
    entry = Converted(copied(gm), plan, (), places, break_of(gm), autocast)
    if any(isinstance(example_inputs[i], FakeTensor) for i in places):
        return entry  # one of the parts that torch makes of a graph for DistributedDataParallel; kept at its first call
    return replace(entry, parameters=_named(entry, example_inputs, paths))


def copied(gm: GraphModule, kind: type[GraphModule] = GraphModule) -> GraphModule:
    """Return a copy of a graph and of the bodies of its higher-order ops, over the same tensors."""
    graph = Graph(tracer_cls=RuntimeTracer)
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.set_codegen(copy.copy(codegen_of(gm.graph)))
    made = kind(gm, graph, type(gm).__name__)
    made.meta = dict(gm.meta)
    for node in made.graph.find_nodes(op="get_attr"):
        body = attribute_of(made, str(node.target))
        if isinstance(body, GraphModule):
            node.target = str(node.target).replace(".", "_")
            setattr(made, node.target, copied(body))
    return made


def record(entry: Converted, inputs: Sequence[Any], scope: Scope | None) -> None:
    """Keep a converted graph for as long as the compiled module, or the parameters that it reads."""
    if entry.places and not entry.parameters:
        return
    for key in (*(inputs[i] for i in entry.places), *(() if scope is None else (scope.root,))):
        kept = _KEPT.setdefault(key, [])
        if not any(e.graph is entry.graph and e.plan == entry.plan for e in kept):  # swapped parameters come each call
            kept.append(entry)


def _named(entry: Converted, inputs: Sequence[Any], paths: Iterable[str]) -> tuple[tuple[weakref.ref[Any], str], ...]:
    return tuple((weakref.ref(inputs[i]), path) for i, path in zip(entry.places, paths, strict=True))


def reused(entry: Converted, inputs: Sequence[Any]) -> None:
    """Keep a graph for the parameters of a later call too: Dynamo runs it for any module of the same code.

    Raises:
        PolicyError: the policy asks for other colours in that module, by its path.
    """
    found = current_scope()
    record(elsewhere(entry, inputs, found.parameters if found is not None else {}), inputs, found)


def elsewhere(entry: Converted, inputs: Sequence[Any], known: Mapping[int, str]) -> Converted:
    """Return a graph for the parameters that another call reads by it, with their paths where these are known.

    Raises:
        PolicyError: the policy asks for other colours in that module, by its path.
    """
    if not entry.parameters:
        return replace(entry, parameters=_named(entry, inputs, [known.get(id(inputs[i]), "") for i in entry.places]))
    before = [path for _, path in entry.parameters]
    after = [known.get(id(inputs[i]), path) for i, path in zip(entry.places, before, strict=True)]
    ends = zip(reversed(before[0]), reversed(after[0]), strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
    old, new = (paths[0][: len(paths[0]) - same] for paths in (before, after))
    moved = [moved_to(d, new, 0, old) for d in entry.plan.decisions]
    pairs = zip(entry.plan.decisions, moved, strict=True)
    for path, other in dict.fromkeys((a.module_path, b.module_path) for a, b in pairs):
        here, there = (module_override(entry.plan.policy, [(p, ())]) for p in (path, other))
        if (here and here.colour) != (there and there.colour):
            raise PolicyError(
                f"'{path}' and '{other}' share one graph, since Dynamo captures their code once, so {here or there} "
                "cannot hold for only one of them. Convert ahead of time, override both, or override a type or an op."
            )
    plan = replace(entry.plan, decisions=tuple(moved))
    return replace(entry, plan=plan, parameters=_named(entry, inputs, after))


def break_of(gm: GraphModule) -> str:
    """Return where and why Dynamo ended a graph early, "" where it did not."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return ""
    stack = getattr(reason, "user_stack", None)
    where = f"{os.path.basename(stack[-1].filename)}:{stack[-1].lineno}" if stack else "an unknown place"
    return f"{where} ({str(reason.reason).splitlines()[0]})"


def entries(module: nn.Module) -> list[Converted]:
    """Return the converted graphs of a compiled module, in order; of one that was captured repeatedly the last.

    Of one code there are several if its numbers or sizes decided differently; those of an earlier policy are left out.

    Raises:
        CaptureError: nothing was captured.
    """
    found = {id(entry): entry for entry in _KEPT.get(_root(module), ())}
    for parameter in () if found else module.parameters():  # it is part of the compiled one
        found |= {id(entry): entry for entry in _KEPT.get(parameter, ())}
    if not found:
        raise CaptureError(_nothing(module))
    once: dict[Any, dict[Any, Converted]] = {}
    for entry in found.values():
        of_code = once.setdefault(entry.code, {})
        if any(e.plan.policy != entry.plan.policy for e in of_code.values()):
            of_code.clear()
        of_code[entry.colours] = entry
    return list(itertools.chain.from_iterable(of_code.values() for of_code in once.values()))


def _root(module: nn.Module) -> nn.Module:
    return original_of(module) or module


def is_compiled(module: nn.Module) -> bool:
    """Say whether this is what torch.compile returned, or a module compiled in place."""
    return compiled_call(module) is not None or original_of(module) is not None or runner_of(module) is not None


def _nothing(module: nn.Module) -> str:
    name, found = type(_root(module)).__name__, anywhere()
    if compiled_call(module) is not None and type(module).__module__.startswith("torch.nn"):
        return (
            f"nothing was captured yet. If it has been called, this torch's .compile() on a class of torch.nn itself, "
            f"such as {name}, captures nothing. Use compiled = torch.compile(model, backend='fxamp'), or "
            "fxamp.compile(model)."
        )
    if not is_compiled(module):
        return f"{name} was not converted by fxamp: pass what fxamp.convert or fxamp.compile returned."
    limits = f" In this process {', '.join(found)} reached the recompile limit: torch captures no more of that code."
    return (
        f"nothing was captured yet: {name} is captured at its first call. If it has been called, torch.compile "
        f"left all of it to Python: set TORCH_LOGS=graph_breaks to see why.{limits if found else ''}"
    )


def plan_of(module: nn.Module) -> Plan:
    """Return one plan over all graphs that were converted for a module, with module paths from its root."""
    found = entries(module)
    paths = {id(p): name.removeprefix("_orig_mod.") for name, p in module.named_parameters()}
    plan = together([(_prefix(entry.paths, paths), entry.plan) for entry in found])
    return replace(plan, notes=(*plan.notes, *coverage(module, found), *reached(_root(module))))


def together(parts: Sequence[tuple[str, Plan]]) -> Plan:
    """Return one plan for parts of a model, given as the prefix of the paths of each, such as "encoder.", and its plan.

    Their graphs are numbered in order, and the policy is that of the first.
    """
    decisions: list[Decision] = []
    for prefix, plan in parts:
        first = max((d.graph for d in decisions), default=-1) + 1
        decisions += [moved_to(d, prefix, first) for d in plan.decisions]
    plans = [plan for _, plan in parts]
    return replace(plans[0], decisions=tuple(decisions), states=(), **sums(plans))


def coverage(module: nn.Module, found: Sequence[Converted]) -> list[str]:
    """Describe how much of a model its graphs cover, unless one graph covers all of it."""
    inside = {i for entry in found for i in entry.paths}
    named = [(name.removeprefix("_orig_mod."), p) for name, p in module.named_parameters()]
    outside = [name for name, p in named if id(p) not in inside]
    if not outside and not any(entry.broke for entry in found):
        return []
    held = sum(p.numel() for _, p in named if id(p) in inside)
    share = held / max(sum(p.numel() for _, p in named), 1)
    ops = sum(len(entry.plan.decisions) for entry in found)
    left = f"; outside: {', '.join(outside[:5])}{' and more' if len(outside) > 5 else ''}" if outside else ""
    policy, between = found[0].plan.policy, "code between graphs runs unconverted, in the model's own dtypes"
    if all(entry.autocast for entry in found):
        plain = policy.level.is_autocasts and not policy.modules and not policy.ops
        between = f"code between graphs runs under autocast{'' if plain else ', as at O1 without overrides'}"
    return [
        f"{len(found)} graphs of {ops} floating-point ops hold {len(named) - len(outside)} of {len(named)} parameters "
        f"({share:.0%} of their elements){left}; {between}",
        *dict.fromkeys(f"graph break at {entry.broke}" for entry in found if entry.broke),
    ]


def _prefix(captured: dict[int, str], paths: dict[int, str]) -> str:
    """Return the path of the module whose forward was captured, as a prefix: "encoder." if its "fc" is "encoder.fc"."""
    found = [
        paths[i].removesuffix(path)
        for i, path in captured.items()
        if path and (paths.get(i) == path or paths.get(i, "").endswith(f".{path}"))
    ]
    return max(set(found), key=found.count, default="")


def moved_to(decision: Decision, prefix: str = "", first: int = 0, before: str = "") -> Decision:
    """Return a decision with a prefix on its module path, in the place of another, and an offset on its number."""
    key, *causes = (_at(key, prefix, before) for key in (decision.key, *decision.causes))
    path = _path_at(decision.module_path, prefix, before)
    return replace(decision, graph=decision.graph + first, key=key, module_path=path, causes=tuple(causes))


def _at(key: str, prefix: str, before: str) -> str:
    path, _, rest = key.partition("/")
    return f"{_path_at(path, prefix, before)}/{rest}"


def _path_at(path: str, prefix: str, before: str) -> str:
    return f"{prefix}{f'{path}.'.removeprefix(before) if path else ''}".removesuffix(".")
