"""The torch.compile backend "fxamp": the compiler on each graph that TorchDynamo captures.

    torch.compile(model, backend="fxamp", options={"policy": "O1"})          # by entry point
    model.compile(backend="fxamp", options={"policy": "O1"})                 # in place

Dynamo handles guards, graph breaks, recompiles, dynamic shapes and modes. The inner backend receives an ordinary graph
with casts and without autocast regions, so its caches keep working.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from passes._torch import FakeTensor, enter_autocast
from passes.contract.costs import CostModel
from passes.contract.errors import PolicyError, public
from passes.contract.plan import Plan
from passes.contract.policy import Policy, check_used, nearest, type_names
from passes.graph.grad import requires_grad
from passes.graph.notes import Origin, Origins, buffer_origin
from passes.graph.outputs import read_outputs
from passes.graph.values import LOW_DTYPES, described, no_autocast, retyped
from passes.ops import ops
from passes.ops.rules import row_of
from passes.runtime.casts import CAST, again
from passes.runtime.regions import recompute

from .._torch import codes_in_trace, inner_backend, is_number_input, trace_artifact
from ..observe.watch import Compile
from .call import current
from .describe import ambient_dtype, describe
from .device_reads import reads_of_device
from .graph import Described, Graph, attribute_of, break_of, copied, graphs_in, inputs_of, is_attribute, is_held
from .in_place import compiled_in_place
from .inputs import first_device
from .outputs import note_leaving, own_values
from .parameters import of_eight_bits, opaque_parameters, refuse_low_parameters
from .run import GraphCall, Kept
from .scope import Scope, is_gathered, is_training, scope
from .state import TRAINED, state_of

logger = logging.getLogger(__name__)
Inner = str | Callable[..., Any]
_OURS = ("policy", "backend", "mode")
_WITHOUT_AUTOCAST = (
    "captured without autocast: Python code that reads dtypes (finfo, dtype= arguments, branches) sees FP32, and code "
    "between graphs runs in FP32; under fxamp.compile, or inside torch.autocast, both follow autocast"
)


@public
@dataclass(frozen=True)
class Backend:
    """A backend of `torch.compile`. Backends with the same settings are equal, so a second one recompiles nothing.

    Attributes:
        policy: The policy of the conversion. Without a dtype it takes the dtype of the surrounding autocast.
        backend: The inner backend, by name or as a callable.
        mode: The inner backend's mode.
        options: The inner backend's options, as pairs.

    Example:
        >>> fxamp.backend("O1", "eager") == fxamp.Backend(fxamp.Policy("O1"), "eager")
        True
    """

    policy: Policy
    backend: Inner = "inductor"
    mode: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def __name__(self) -> str:
        return "fxamp"

    def __hash__(self) -> int:
        return hash((self.policy, self.backend, self.mode, repr(self.options)))

    def __call__(
        self, gm: GraphModule, example_inputs: list[Any], *,
        mode: str | None = None, options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:  # fmt: skip
        """Convert one graph in place, give it to the inner backend, and return the backend's result."""
        if mode or options:
            ours, rest = split(options)
            given = {"policy": self.policy, "backend": self.backend, "mode": mode or self.mode}
            return backend(**{**given, **ours}, options={**dict(self.options), **rest})(gm, example_inputs)
        graph, inner = rewrite(gm, example_inputs, self.policy, eager=self.backend == "eager"), self.backend
        inner = inner_of(gm.graph, inner)
        graph = replace(graph, kept=None if inner == "eager" else Kept(inner))
        graph = compiled_in_place(example_inputs, scope()).add(graph)
        run, again = compile_by(inner, self.mode, dict(self.options), gm, example_inputs)
        return GraphCall(graph, gm, run, again, example_inputs, graph.plan.policy.device or "cpu")


def inner_of(graph: FxGraph, inner: Inner) -> Inner:
    """Return what compiles an emitted graph: "eager" in the place of what AOTAutograd fails at."""
    # It does at a recurrent layer whose weights have gradients and whose input has none.
    layers = [n for n in graph.nodes if row_of(n).recurrent] if inner != "eager" and torch.is_grad_enabled() else []
    grad = requires_grad(graph) if layers else frozenset[Node]()
    for node in layers:
        if node in grad and next(ops.operands(node)).node not in grad:
            logger.info("fxamp: the graph with %s runs uncompiled: its input has no gradient", described(node))
            return "eager"
    return inner


def compile_by(
    inner: Inner, mode: str | None, options: Mapping[str, Any], gm: GraphModule, inputs: Sequence[Any]
) -> tuple[Callable[..., Any], Compile]:
    """Have the inner backend compile an emitted graph; return what runs it, and what compiles it with more options."""
    if inner != "eager":
        leave_sharing_to_the_compiler(gm)
    with no_autocast(), _casts_by_method(gm) if inner == "eager" else contextlib.nullcontext():
        run = inner_backend(inner, mode, {**options})(gm, inputs)

    def again(more: Mapping[str, Any], given: Sequence[Any]) -> Any:
        known = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
        kept = [a if isinstance(a, (FakeTensor, torch.SymInt)) else b for a, b in zip(known, given, strict=True)]
        return inner_backend(inner, mode, {**options, **more})(gm, kept)  # for the sizes that it was captured for

    return run, again


@contextlib.contextmanager
def _casts_by_method(gm: GraphModule) -> Iterator[None]:
    """Have casts be methods of tensors in the code that a graph has now; through `torch.ops` each takes longer."""
    found = gm.graph.find_nodes(op="call_function", target=CAST)
    casts = [n for n in found if len(n.args) == 2 and not n.kwargs]  # an author's own may name a memory format
    for cast in casts:
        cast.target = torch.Tensor.to
    gm.recompile()
    _ = gm.code  # torch writes it when it is asked for; until then `forward` is what asks, and makes a detour
    try:
        yield
    finally:
        for cast in casts:
            cast.target = CAST
        gm.recompile()


def leave_sharing_to_the_compiler(gm: GraphModule) -> None:
    """Replace casts that share a storage by plain ones: compilers merge those, and cache graphs of torch's ops only."""
    for part in graphs_in(gm):
        for node in part.graph.find_nodes(op="call_function", target=again):
            node.target, node.args = CAST, node.args[:2]
        part.recompile()


def recompute_as_written(gm: GraphModule) -> None:
    """Have a graph recompute as the author's code does, in place; torch's own op leaves that to a compiler."""
    held = {n for n in gm.graph.find_nodes(op="placeholder") if is_held(n)}
    for part in graphs_in(gm):  # a graph before those inside it
        recomputed = [n for n in part.graph.nodes if row_of(n).recomputed]
        for node in recomputed:
            inputs = attribute_of(part, str(node.args[0].target)).graph.find_nodes(op="placeholder")
            places = tuple(at for at, value in enumerate(node.args[1:]) if value in held)
            held.update(inputs[at] for at in places)
            node.target, node.kwargs = recompute, {**node.kwargs, "held": places}
        if recomputed:
            part.recompile()


def backend(
    policy: Policy | str = "O1",
    backend: Inner = "inductor",
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Backend:
    """Return a backend for `torch.compile(model, backend=...)`.

    Args:
        policy: A level, a policy string or a Policy.
        backend: The inner backend, which compiles the converted graphs: "inductor", "eager", "aot_eager", the name of
            any other, or a callable `(graph_module, example_inputs)`.
        mode: For the inner backend, as `torch.compile` takes it.
        options: For the inner backend.

    Raises:
        PolicyError: The policy is wrong, or there is no such inner backend.

    Example:
        >>> compiled = torch.compile(model, backend=fxamp.backend("O1,dtype=bf16", "eager"))
        >>> compiled(x).shape
        torch.Size([3, 4])
    """
    if isinstance(policy, GraphModule):
        raise PolicyError("fxamp.backend makes a backend: call it, as in torch.compile(m, backend=fxamp.backend()).")
    chosen = Policy.of(policy)
    if chosen.cost == "measured":
        raise PolicyError(
            "cost='measured' needs example inputs before training: use fxamp.convert, or cost='bytes' here."
        )
    require_inner(backend)
    return Backend(chosen, backend, mode, tuple(sorted((options or {}).items())))


def require_inner(backend: object) -> None:
    """Raise PolicyError for an inner backend that `torch.compile` does not have, or that is fxamp itself."""
    if isinstance(backend, Backend) or backend == "fxamp":
        raise PolicyError("the inner backend of fxamp cannot be fxamp itself: use 'inductor', 'aot_eager' or 'eager'.")
    require_backend(backend)


def require_backend(backend: object) -> None:
    """Raise PolicyError unless `torch.compile` takes this as a backend: a callable, or a name that it knows."""
    if isinstance(backend, str):
        known = torch.compiler.list_backends(())
        if backend not in known:
            raise PolicyError(f"there is no torch.compile backend {backend!r}{nearest(backend, known)}.")
    elif not callable(backend):
        raise PolicyError(f"an inner backend is a name or a callable, not {type(backend).__name__}.")


def entry_point(
    gm: GraphModule, example_inputs: list[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph for `torch.compile(model, backend="fxamp", mode=..., options=...)`.

    Of the options, "policy", "backend" and "mode" are fxamp's; the rest goes to the inner backend.
    """
    ours, rest = split(options)
    for key in rest:
        if meant := difflib.get_close_matches(key, _OURS, n=1, cutoff=0.75):
            raise PolicyError(f"there is no option {key!r}; the nearest name is {meant[0]!r}.")
    return backend(**{"mode": mode, **ours}, options=rest)(gm, example_inputs)


def split(options: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that are fxamp's, and those that are the inner backend's."""
    if options is not None and not isinstance(options, Mapping):
        raise PolicyError(f"options is a mapping of the backend's options, not {type(options).__name__}.")
    given = dict(options or {})
    return {k: v for k, v in given.items() if k in _OURS}, {k: v for k, v in given.items() if k not in _OURS}


def rewrite(
    gm: GraphModule, inputs: list[Any], policy: Policy, *,
    method: str = "", eager: bool = False, runs_on: str | None = None, in_region: bool = False,
    replayed: Callable[[FxGraph], tuple[Plan | None, bool]] | None = None,
    costs: CostModel | None = None, alone: Sequence[Any] | None = None, lowered: Collection[str] = (),
) -> Graph:  # fmt: skip
    """Convert a graph from Dynamo, in place, which is compiled for some inputs; return what is known of it.

    A device and a dtype that the policy leaves open are those of the inputs and of the surrounding autocast. That was
    on for `runs_on` while Dynamo traced, if the policy is for another kind of device, or was the author's own and is in
    the graph, if `in_region`. What is recomputed in a graph that runs node by node, `eager`, is so as in the author's
    code. `replayed` gives the plan to carry out for a described graph, and whether it is of this very graph; `alone`
    are the dtypes of the outputs in a trace without autocast, and `lowered` the parameters that forward has made low.

    Raises:
        PolicyError: the policy does not fit the model.
    """
    if eager:
        recompute_as_written(gm)
    captured, found = copied(gm), scope()
    if not eager:
        recompute_as_written(captured)
    places = gm.graph.find_nodes(op="placeholder")  # torch may put the switch of a region before them
    known = inputs_of(gm, inputs, {} if found is None else found.names)
    named = [(given.path, v) for given, v in zip(known, inputs, strict=True)]
    notes = (
        *refuse_low_parameters(named, is_training(), is_gathered, lowered),
        *opaque_parameters(named),
        *of_eight_bits(found, policy),
    )
    values = [v for given, v in zip(known, inputs, strict=True) if given.kind != "number"]
    device = policy.device or first_device(sorted(values, key=lambda v: not isinstance(v, nn.Parameter)))
    origins = Origins()
    for node, value in zip(places, inputs, strict=True):
        origins[node] = _origin_of_input(node, value)
        if isinstance(value, torch.Tensor):  # torch may have split the graph into parts, after another trace
            for key in {"example_value", "val"} & node.meta.keys():
                node.meta[key] = retyped(node.meta[key], value.dtype)
    if found is not None:
        refuse_unmatched(policy, found.root)
    note_leaving(gm.graph, origins)
    here = runs_on or device
    on = not in_region and torch.is_autocast_enabled(here)
    settled = policy.dtype if in_region else None
    ambient = (settled or ambient_dtype(gm.graph, here)) if policy.level.rounds else None
    notes = (*notes, *_planned_elsewhere(gm, here, device))
    dtype = policy.dtype or ambient or torch.get_autocast_dtype(device)
    resolved = replace(policy, device=device, dtype=dtype)
    under = on or ambient is not None
    weights = (v for given, v in zip(known, inputs, strict=True) if given.kind == "parameter")
    stays = any(v.dtype in LOW_DTYPES for v in weights) and not is_gathered()
    crossed = _crossed(gm, inputs, found, origins, dtype)
    with no_autocast():
        own = describe(
            gm, origins, scope=found, ambient=under, policy=resolved, crossed=crossed, alone=alone, stays=stays
        )
    read = read_outputs(gm.graph) if policy.level.rounds else ()
    if not under and policy.level.rounds:
        notes = (*notes, _WITHOUT_AUTOCAST)
    given_plan, exact = (None, True) if replayed is None else replayed(gm.graph)
    described = Described.of(gm, origins, resolved, notes, under)
    plan = described.compile(gm, plan=given_plan, exact=exact, costs=costs)
    for node in gm.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    gm.recompile()
    trace_artifact("fxamp_precision", plan.to_json)
    state = TRAINED if found is None else state_of(found.root, method)
    return Graph(copied(gm), plan, captured, described, known, state, break_of(gm), autocast=under, read=read, own=own)


def _planned_elsewhere(gm: GraphModule, here: str, device: str) -> tuple[str, ...]:
    """Have regions of autocast here be those of the planned device; return notes on what may differ there."""
    if here == device:
        return ()
    for part in graphs_in(gm):
        for node in part.graph.find_nodes(op="call_function", target=enter_autocast):
            if node.args[0] == here:
                node.args = (device, *node.args[1:])
    return reads_of_device(codes_in_trace(), here)


def _origin_of_input(node: Node, value: Any) -> Origin:
    if is_attribute(node):
        return buffer_origin(value)
    return Origin(role="parameter" if isinstance(value, nn.Parameter) else "number" if is_number_input(node) else "")


def _crossed(gm: GraphModule, inputs: list[Any], found: Scope | None, origins: Origins, low: torch.dtype) -> set[Node]:
    """Return the low inputs that crossed a graph break and are low by autocast: a graph of the call made them."""
    call, (model, given) = current(), (nn.Module(), ()) if found is None else (found.root, found.given)
    is_own = own_values(model, given, low, {} if call is None else call.own)
    pairs = zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)
    values = [(n, v) for n, v in pairs if isinstance(v, torch.Tensor) and v.dtype in LOW_DTYPES and not origins[n].role]
    return {n for n, v in values if not is_own(v)}


def refuse_unmatched(policy: Policy, model: nn.Module) -> None:
    """Raise PolicyError for an override by module that matches none of a model."""
    if policy.modules:
        types = {path: type_names(type(m)) for path, m in model.named_modules(remove_duplicate=False)}
        check_used(replace(policy, ops=()), [[(path, names)] for path, names in types.items()], ())
