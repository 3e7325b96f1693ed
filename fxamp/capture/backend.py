"""The torch.compile backend "fxamp": the compiler on each graph that TorchDynamo captures.

    torch.compile(model, backend="fxamp", options={"policy": "O1"})          # by entry point
    model.compile(backend="fxamp", options={"policy": "O1"})                 # in place

Dynamo handles guards, graph breaks, recompiles, dynamic shapes and modes. The inner backend receives an ordinary graph
with casts and without autocast regions, so its caches keep working.
"""

from __future__ import annotations

import difflib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from passes import compile_graph
from passes._torch import FakeTensor, inner_backend, trace_artifact
from passes.contract.costs import Penalties, Timer
from passes.contract.errors import PolicyError
from passes.contract.plan import Plan
from passes.contract.policy import Policy, check_used, nearest, type_names
from passes.graph.notes import note, note_buffer, note_of
from passes.graph.values import LOW_DTYPES, no_autocast, retyped
from passes.ops.rules import row_of
from passes.runtime.casts import CAST, again

from ..trust.watch import Compile, node_by_node
from . import compiled, recompile_limit
from .advice import name_the_op
from .capture_jit import ambient_dtype, attribute_of, describe, is_attribute, parameter_path
from .fused import note_fused, without_gradients
from .kept import Kept
from .outputs import is_low_of_its_own, is_low_throughout, note_leaving, note_own
from .parameters import low_parameters, opaque_parameters, refuse_low_parameters
from .scope import Scope, is_gathered, is_training, scope
from .underflow import UnderflowWatch

Inner = str | Callable[..., Any]
_OURS = ("policy", "backend", "mode")
_NOT_EAGER = (
    "a graph with activation checkpointing is compiled by 'aot_eager': 'eager' would recompute dropout differently"
)
_WITHOUT_AUTOCAST = (
    "captured without autocast: Python code that reads dtypes (finfo, dtype= arguments, branches) sees FP32, and code "
    "between graphs runs in FP32; under fxamp.compile, or inside torch.autocast, both follow autocast"
)


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
        inner, notes = inner_of(self.backend, gm)
        converted, outputs = rewrite(gm, example_inputs, self.policy, notes)
        converted = compiled.record(converted, example_inputs, scope())
        if inner != "eager":
            leave_sharing_to_the_compiler(gm)
        with no_autocast():
            run = inner_backend(inner, self.mode, dict(self.options))(gm, example_inputs)
        run = node_by_node(run, gm, converted, inner, compiling(inner, self.mode, dict(self.options), gm))
        return at_call(run, converted, example_inputs, outputs, compiled.reused)


def compiling(inner: Inner, mode: str | None, options: dict[str, Any], gm: GraphModule) -> Compile:
    """Return what compiles a graph once more, with further options, for the sizes that it was captured for."""

    def compile(more: Mapping[str, Any], given: Sequence[Any]) -> Callable[..., Any]:
        known = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
        kept = [a if isinstance(a, (FakeTensor, torch.SymInt)) else b for a, b in zip(known, given, strict=True)]
        made: Callable[..., Any] = inner_backend(inner, mode, {**options, **more})(gm, kept)
        return made

    return compile


def leave_sharing_to_the_compiler(gm: GraphModule) -> None:
    """Replace casts that share a storage by plain ones: compilers merge those, and cache graphs of torch's ops only."""
    for part in gm.modules():
        if isinstance(part, GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=again):
                node.target, node.args = CAST, node.args[:2]
            part.recompile()


def inner_of(backend: Inner, gm: GraphModule) -> tuple[Inner, tuple[str, ...]]:
    """Return the inner backend for a graph, and notes for the plan."""
    nodes = (n for part in gm.modules() if isinstance(part, GraphModule) for n in part.graph.nodes)
    if backend == "eager" and any(row_of(n).recomputed for n in nodes):
        return "aot_eager", (_NOT_EAGER,)
    return backend, ()


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
    chosen = Policy.of(policy)
    if chosen.cost == "measured":
        raise PolicyError(
            "cost='measured' needs example inputs before training: use fxamp.convert, or cost='bytes' here."
        )
    require_inner(backend)
    return Backend(chosen, backend, mode, tuple(sorted((options or {}).items())))


backend_of = backend  # for functions that have an argument of that name


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
    given = dict(options or {})
    return {k: v for k, v in given.items() if k in _OURS}, {k: v for k, v in given.items() if k not in _OURS}


def rewrite(
    gm: GraphModule, example_inputs: list[Any], policy: Policy, notes: tuple[str, ...] = (), *,
    runs_on: str | None = None, replayed: Callable[[Graph], tuple[Plan | None, bool]] | None = None,
    timer: Timer | None = None, penalties: Penalties | None = None,
) -> tuple[compiled.Converted, dict[int, torch.dtype]]:  # fmt: skip
    """Convert a graph from Dynamo, in place; return the decisions, and the outputs' dtypes in the model itself.

    Args:
        gm: the graph; it is changed.
        example_inputs: its inputs.
        policy: what is asked. Without a device or dtype, those of the inputs and of the surrounding autocast are taken.
        notes: what is to be said in the plan.
        runs_on: the kind of device of the autocast that was on while Dynamo traced, if the policy is for another one.
        replayed: gives the plan to carry out for a described graph, and whether it is of this very graph.
        timer: measures calls, for cost="measured".
        penalties: what errors cost beside bytes.
    """
    places = gm.graph.find_nodes(op="placeholder")  # torch may put the switch of a region before them
    named = [(parameter_path(n), v) for n, v in zip(places, example_inputs, strict=False)]
    notes = (*notes, *refuse_low_parameters(named, is_training(), is_gathered), *opaque_parameters(named))
    device = policy.device or _device(example_inputs)
    for node, value in zip(places, example_inputs, strict=False):
        if is_attribute(node):
            note_buffer(node, value)
        else:
            note(node, role="parameter" if isinstance(value, nn.Parameter) else "")
        if isinstance(value, torch.Tensor):  # torch may have split the graph into parts, after another trace
            for key in {"example_value", "val"} & node.meta.keys():
                node.meta[key] = retyped(node.meta[key], value.dtype)
    found = scope()
    if found is not None:
        refuse_unmatched(policy, found.root)
    own, given = _own_and_given(gm, example_inputs, found)
    note_leaving(gm.graph, [a or b for a, b in zip(own, given, strict=True)])
    here = runs_on or device
    on = torch.is_autocast_enabled(here)
    ambient = ambient_dtype(gm.graph, here, policy.dtype) if policy.level.rounds else None
    dtype = policy.dtype or ambient or torch.get_autocast_dtype(device)
    resolved = replace(policy, device=device, dtype=dtype)
    under = on or ambient is not None
    with no_autocast():
        outputs = describe(gm, scope=found, ambient=under, policy=resolved, own=own, given=given)
    if found is not None:
        _note_fused(gm, found.root)
    if not under and policy.level.rounds:
        notes = (*notes, _WITHOUT_AUTOCAST)
    given_plan, exact = (None, True) if replayed is None else replayed(gm.graph)
    plan = compile_graph(
        gm.graph, resolved, functools.partial(attribute_of, gm), capture="dynamo", notes=notes, under_autocast=under,
        plan=given_plan, exact=exact, timer=timer, penalties=penalties,
    )  # fmt: skip
    for node in gm.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    gm.recompile()
    recompile_limit.watch()
    trace_artifact("fxamp_precision", functools.partial(_record_of, plan))
    return compiled.converted_of(gm, plan, example_inputs, found, autocast=under), outputs


def _note_fused(gm: GraphModule, root: nn.Module) -> None:
    """Note where eager evaluation runs a fused attention; Dynamo itself captures the fused encoder layer."""

    def evaluates(path: str) -> bool:
        module = root.get_submodule(path)
        return not module.training and without_gradients(module)

    note_fused(gm.graph, root, (nn.MultiheadAttention,), evaluates)


def _own_and_given(gm: GraphModule, example_inputs: list[Any], found: Scope | None) -> tuple[list[bool], list[bool]]:
    """Return two flags for each input: the model holds it or has made it low; the model was called with it."""
    leaves = () if found is None else found.given
    given = [any(v is leaf for leaf in leaves) for v in example_inputs]
    low = found is not None and is_low_throughout(found.root, leaves)
    pairs = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, given, strict=False)
    return [note_of(n).role != "" or is_low_of_its_own(v, low and not g) for n, v, g in pairs], given


def _record_of(plan: Plan) -> str:
    """Return the record of a plan as JSON; the code that writes it is loaded only when torch traces."""
    from ..report.record.build import record_of

    return record_of(plan).to_json()


def _device(example_inputs: list[Any]) -> str:
    """Return the kind of device of the parameters, else of the inputs, else the CPU."""
    tensors = [t for t in example_inputs if isinstance(t, torch.Tensor)]
    found = next((t for t in tensors if isinstance(t, nn.Parameter)), tensors[0] if tensors else None)
    return found.device.type if found is not None and found.device.type != "meta" else "cpu"


def refuse_unmatched(policy: Policy, model: nn.Module) -> None:
    """Raise PolicyError for an override by module that matches none of a model."""
    if policy.modules:
        types = {path: type_names(type(m)) for path, m in model.named_modules(remove_duplicate=False)}
        check_used(replace(policy, ops=()), [[(path, names)] for path, names in types.items()], ())


def at_call(
    run: Callable[..., Any], converted: compiled.Converted, example_inputs: Sequence[Any],
    own: Mapping[int, torch.dtype] = MappingProxyType({}),
    reused: Callable[[compiled.Converted, Sequence[Any]], None] | None = None, kept: Kept | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Return a function that calls a compiled graph with ambient autocast off.

    It marks the outputs at `own` with their dtypes in the model itself, tells `reused` of the models that use it, and
    shows `kept` its calls.
    """
    device = converted.plan.policy.device or "cpu"
    first = converted.places[0] if converted.places else 0
    last = weakref.ref(example_inputs[first]) if converted.places and reused is not None else None
    watch = UnderflowWatch(converted.plan)
    told = _told(example_inputs)
    paths = dict(zip(converted.places, (path for _, path in converted.parameters), strict=False))
    low = {i: path for i, path in paths.items() if low_parameters([(path, example_inputs[i])])}

    @functools.wraps(run, updated=())
    def call(*args: Any) -> Any:
        nonlocal last
        if last is not None and reused is not None and args[first] is not last():
            reused(converted, args)
            last = weakref.ref(args[first])
        if low and torch.is_grad_enabled():  # Dynamo does not guard the mode of a model that does not read it
            refuse_low_parameters([(path, args[i]) for i, path in low.items()], is_training(), is_gathered)
        if told:
            args = tuple(a.to(told[i]) if i in told and a.dtype != told[i] else a for i, a in enumerate(args))
        with no_autocast([device]):
            try:
                outputs = run(*args)
            except Exception as e:
                name_the_op(e)
                raise
        if kept is not None:
            kept(args, outputs)
        if own:
            outputs = noted(outputs, own)
        if not watch.done:
            watch(outputs)
        return outputs

    return call


def noted(outputs: Sequence[Any], own: Mapping[int, torch.dtype]) -> list[Any]:
    """Mark outputs with their dtypes in the model itself; the same tensor with another dtype becomes a view of it."""
    noted: dict[int, torch.dtype | None] = {}
    made = list(outputs)
    for i, output in enumerate(outputs):
        dtype = own.get(i)
        if noted.setdefault(id(output), dtype) != dtype:
            made[i] = output.view_as(output)
        if dtype is not None:
            note_own(made[i], dtype)
    return made


def _told(example_inputs: Sequence[Any]) -> dict[int, torch.dtype]:
    """Return the dtypes of the inputs at compile time, for a part of a graph that torch splits for DDP.

    They are autocast's dtypes. A value that the policy keeps in FP32 nevertheless arrives in FP32 from the previous
    part.
    """
    if not any(isinstance(value, FakeTensor) for value in example_inputs):
        return {}
    values = {i: v for i, v in enumerate(example_inputs) if isinstance(v, FakeTensor)}
    return {i: v.dtype for i, v in values.items() if v.dtype in LOW_DTYPES and not isinstance(v, nn.Parameter)}
