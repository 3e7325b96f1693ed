"""Storage in 16 bits of what a later kernel reads, which is O2 of a compiled step; arithmetic stays FP32.

Before: mul = x * y;                                               ...; grad = tangent * mul
After:  mul = x * y; low = mul.to(bfloat16); stored = low.float(); ...; grad = tangent * stored

A kernel of Inductor computes in FP32 registers, so that a dtype costs and rounds only where a value is stored. What is
stored is known once the joint graph of forward and backward is cut in two: a first cut says what is saved, and kernels
of libraries, such as products, lie between those that Inductor generates. Readers in the kernel that computes a value
read it unrounded, and so do those of forward: the loss is that of O1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from passes._torch import example_of
from passes.contract.errors import PlanError
from passes.contract.plan import Plan, Stored
from passes.contract.policy import Policy, dtype_name, module_override, type_names
from passes.graph.values import frames

from ..capture.graph import copied
from ..observe.fused import CAST, MOVES, Fused, is_pointwise, is_reduction, op_name
from ..view.runner import Runner
from .compiler import CompileSettings

Part: TypeAlias = Literal["saved", "backward"]
PARTS: tuple[Part, ...] = ("saved", "backward")
LEAST = 4096  # elements: below, a kernel takes as long as its launch
# What has a kernel of its own that Inductor generates: it can cast what it reads, and what it makes.
_GENERATED = {"cat", "embedding", "index", "index_put", "scatter", "scatter_add"}


def why_not(runners: Sequence[Runner], settings: CompileSettings) -> str:
    """Return why the plan of an eager O2 is compiled for some views, and not O1's, with what is stored in 16 bits.

    Or why of a plan that stores values so its decisions alone are.
    """
    if reason := _why_not(runners, settings):
        return f"the plan's values are not stored in 16 bits, since {reason}" if stored_by_plans(runners) else reason
    return ""


def _why_not(runners: Sequence[Runner], settings: CompileSettings) -> str:
    if settings.backend != "inductor":
        return f"'{settings.name}' is asked to compile, of which it is not known what it stores"
    if not all(map(is_o2, runners)):
        return "not all views in the graph follow O2"
    if any(runner.graphs.low != torch.bfloat16 for runner in runners):
        return "FP16 does not have the range of values that are stored in FP32"
    plans = [runner.graphs.replayed for runner in runners]
    if any(plans) and not all(plan is not None and plan.stored for plan in plans):
        return "a plan is carried out, in which nothing is stored so"
    from .partitioner import theirs

    return theirs(settings.options)


def is_o2(runner: Runner) -> bool:
    """Say whether a view follows the level that stores values in 16 bits, and rounds no sensitive op."""
    level = runner.graphs.policy.level
    return level.stores_low and not level.rounds_sensitive


def stored_by_plans(runners: Sequence[Runner]) -> tuple[Stored, ...]:
    """Return what the plans of views store in 16 bits beside; those of parts of one plan say the same."""
    plans = [runner.graphs.replayed for runner in runners]
    return tuple(dict.fromkeys(each for plan in plans if plan is not None for each in plan.stored))


def refuse_missing(stored: Collection[Stored], runners: Sequence[Runner]) -> None:
    """Raise PlanError if a step does not store what the plans of its views do."""
    ours = set(map(_place, stored))
    missing = [each for each in stored_by_plans(runners) if _place(each) not in ours]
    if missing:
        made = next(r.graphs.replayed.torch_version for r in runners if isinstance(r.graphs.replayed, Plan))
        raise PlanError(
            f"the plan stores in 16 bits what the joint graph of this step does not have, with torch "
            f"{torch.__version__} (the plan was made with {made}): {missing[0]}; {len(missing)} missing. Make a new "
            "plan: convert the model by a policy, and save the plan() of its compiled step."
        )


def _place(stored: Stored) -> tuple[Any, ...]:
    return stored.graph, stored.part, stored.name, stored.module, stored.dtype


def options_for(runners: Sequence[Runner], graph: int) -> dict[str, Any]:
    """Return the options of Inductor under which it stores in 16 bits what later kernels of a graph read.

    It is the one of that place among the graphs of a call.
    """
    from .partitioner import options_with

    choice = stored_by_plans(runners)
    only = choice_of(choice, graph) if choice else None
    policies = tuple(runner.graphs.policy for runner in runners)
    return options_with(AtRest(torch.bfloat16, policies, only=only), __file__)


def choice_of(stored: Iterable[Stored], graph: int) -> tuple[tuple[str, str, str], ...]:
    """Return what is stored of a graph, by its place among those of a call, as `AtRest.only` takes it."""
    return tuple((s.part, s.name, s.module) for s in stored if s.graph == graph)


def emulation(stored: Iterable[Stored], graph: int, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return what runs a graph as Inductor's kernels would, with some values stored in 16 bits; nothing is compiled."""
    from ..measure.inductor import STORED
    from .partitioner import emulated

    def run(part: GraphModule) -> Callable[..., Any]:
        return lambda *args: Fused(part, lambda node: STORED in node.meta).start(*args)

    return emulated(copied(gm), inputs, AtRest(torch.bfloat16, only=choice_of(stored, graph)), run)


@dataclass(frozen=True)
class AtRest:
    """Stores in a low dtype what is "saved" for backward, and what kernels of "backward" hand on.

    What lies in a module that one of the `policies` keeps in FP32 is stored so. With `only`, what is stored has been
    chosen: its part, its name and the path of its module. How large it is does not matter then.
    """

    low: torch.dtype
    policies: tuple[Policy, ...] = ()
    parts: tuple[Part, ...] = PARTS
    only: tuple[tuple[str, str, str], ...] | None = None

    def __str__(self) -> str:
        return f"{dtype_name(self.low)} {self.parts} {self.only} {' '.join(map(str, self.policies))}"

    def __call__(self, graph: Graph, saved: Collection[str], outputs: int) -> None:
        """Round what is stored in a joint graph, in place.

        A first cut of it saves nodes with these names; so many of its outputs are those of forward.
        """
        from ..measure.inductor import STORED  # imports Inductor

        for node, (part, readers) in self._chosen(graph, saved, outputs).items():
            stored = Stored(part, node.name, _module(node), _line(node), dtype_name(self.low))
            _store(graph, node, readers, self.low).meta[STORED] = asdict(stored)

    def _chosen(self, graph: Graph, saved: Collection[str], outputs: int) -> dict[Node, tuple[Part, list[Node]]]:
        """Return FP32 values that are stored, each with its part, and the nodes that read it from memory."""
        kernels, repeated = _kernels(graph), _repeated(graph)
        forward, gradients = _forward(graph, outputs), _gradients(graph)
        chosen: dict[Node, tuple[Part, list[Node]]] = {}
        named = None if self.only is None else {name for _, name, _ in self.only}
        for node in graph.nodes:
            if not _computes(node) or self._keeps(node):
                continue
            if node.name not in named if named is not None else _elements(node) < LEAST or node in repeated:
                continue
            read = [each for each in _readers(node) if _reads_fp32(each[1])]
            later = [user for user, reader, _ in read if kernels[reader] - _starts(reader) > kernels[node]]
            part: Part = "backward"
            if node not in gradients:
                part, of_forward = "saved", forward.isdisjoint(later)
                of_backward = [(user, {node.name, *(v.name for v in views)}) for user, reader, views in read
                               if reader not in forward]  # fmt: skip
                later = [user for user, names in of_backward if not names.isdisjoint(saved)]
                if self.only is not None and not later:  # with these sizes it would be recomputed
                    later = [user for user, _ in of_backward]
                later = later if of_forward else []  # else forward stores it in FP32 in any case
            wanted = part in self.parts if self.only is None else (part, node.name, _module(node)) in self.only
            if later and wanted:
                chosen[node] = part, list(dict.fromkeys(later))
        return chosen

    def _keeps(self, node: Node) -> bool:
        """Say whether a value is stored as it is: it is returned, has no readers in FP32, or a policy says so."""
        if any(user.op == "output" for user in node.users):
            return True
        modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        stack = [(str(path), type_names(kind)) for path, kind in modules.values()]
        overrides = (module_override(policy, stack) for policy in self.policies if policy.modules)
        return any(override is not None and override.colour != "low" for override in overrides)


def _store(graph: Graph, node: Node, readers: Sequence[Node], low: torch.dtype) -> Node:
    """Let readers of an FP32 value read what was stored of it in a low dtype; return that."""
    cast = next((u for u in node.users if u.target is CAST and u.args[1] == low), None)
    meta = {key: node.meta[key] for key in _PLACE if key in node.meta}
    if cast is None:
        cast = graph.call_function(CAST, (node, low))
        cast.meta = {**meta, "val": node.meta["val"].to(low)}
    node.append(cast)  # before all readers
    with graph.inserting_after(cast):
        stored = graph.call_function(CAST, (cast, torch.float32))
    stored.meta = {**meta, "val": node.meta["val"].to(torch.float32)}
    for reader in readers:
        reader.replace_input_with(node, stored)
    return cast


# Where a node stands, for the partitioner too, and how checkpoints that it lies in are recomputed.
_PLACE = (
    "nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr", "partitioner_tag", "recompute", "ac_graph_id",
)  # fmt: skip


def _moves(node: Node) -> bool:
    return node.op == "call_function" and op_name(node) in MOVES


def _starts(node: Node) -> int:
    """Return 1 for what is not computed in a kernel with its operands, else 0."""
    fused = node.op != "call_function" or is_pointwise(node) or is_reduction(node) or _moves(node)
    return int(not fused)


def _computes(node: Node) -> bool:
    """Say whether Inductor generates the kernel that computes an FP32 value, which is not just another dtype."""
    value = node.meta.get("val")
    return (
        node.op == "call_function" and isinstance(value, Tensor) and value.dtype == torch.float32
        and node.target is not CAST and (is_pointwise(node) or op_name(node) in _GENERATED)
    )  # fmt: skip


def _reads_fp32(reader: Node) -> bool:
    """Say whether a reader is in a generated kernel, and reads more than what is stored low for it already."""
    if reader.target is CAST:
        return reader.args[1] == torch.float32
    return is_pointwise(reader) or is_reduction(reader) or op_name(reader) in _GENERATED


def _readers(node: Node, path: tuple[Node, ...] = ()) -> Iterator[tuple[Node, Node, tuple[Node, ...]]]:
    """Yield the user of a node, what reads it, in the end, through views, and these views."""
    for user in node.users:
        if _moves(user):
            yield from ((user, reader, views) for _, reader, views in _readers(user, (*path, user)))
        elif user.op != "output":
            yield user, user, path


def _elements(node: Node) -> int:
    value = node.meta["val"]
    elements = 1
    for size in value.shape:
        elements *= example_of(size) or 0
    return elements


def _kernels(graph: Graph) -> dict[Node, int]:
    """Return how many kernels of libraries, one after the other, run before a node, or its own if it is one.

    What Inductor generates is computed where it is first read.
    """
    found = dict[Node, int]()
    for node in graph.nodes:
        found[node] = max((found[i] for i in node.all_input_nodes), default=0) + _starts(node)
    for node in reversed(graph.nodes):
        if not _starts(node):
            readers = (user for user in node.users if user.op != "output")
            found[node] = min((found[user] - _starts(user) for user in readers), default=found[node])
    return found


def _forward(graph: Graph, outputs: int) -> set[Node]:
    """Return what the first outputs of a graph depend on."""
    (output,) = graph.find_nodes(op="output")
    found = {value for value in output.args[0][:outputs] if isinstance(value, Node)}
    for node in reversed(graph.nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return found


def _gradients(graph: Graph) -> set[Node]:
    """Return what depends on the gradients of outputs."""
    found = set[Node]()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and str(node.target).startswith("tangents")
        if tangent or any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def _repeated(graph: Graph) -> set[Node]:
    """Return what is broadcast, as a statistic of each row is: its bytes are few beside those of what reads it."""
    found = set[Node]()
    for node in reversed(graph.nodes):
        if isinstance(node.meta.get("val"), Tensor):
            readers = [u for u in node.users if isinstance(u.meta.get("val"), Tensor)]
            inside = [u for u in readers if is_pointwise(u) or _moves(u)]
            if any(u in found or _elements(u) > _elements(node) for u in inside):
                found.add(node)
    return found


def _module(node: Node) -> str:
    """Return the path of the module that a node was traced in, or whose backward it is."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path, _ = next(reversed(stack.values()), ("", None))
    return str(path)


def _line(node: Node) -> str:
    """Return the author's line that a node was traced from, as "net.py:12"."""
    frame = next((each for each in reversed(frames(node)) if not each[0].startswith(_PACKAGES)), None)
    return "" if frame is None else f"{PurePath(frame[0]).name}:{frame[1]}"


_PACKAGES = tuple(f"{PurePath(file).parent.as_posix()}/" for file in (torch.__file__, PurePath(__file__).parent))
