"""The last check: compare the captured graph, before any rounding, with the model on the example inputs."""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from passes._torch import pytree
from passes.contract.errors import INSTEAD, FxampError, NotFaithfulError, RejectedError, VerificationError
from passes.graph.values import LOW_DTYPES, Aliases, dtypes_of, module_path, no_autocast, source
from passes.ops import ops

from ..capture.model.call import CONSTANTS, CallSpec, same_constant
from ..capture.model.snapshot import untouched
from ..capture.model.tensors import held, same
from ..module.bindings import read_directly
from ..module.in_place import called_by_name
from ..module.module import ConvertedModule
from ..module.skeleton import constant_target, skeleton
from .later import runs_to_compare
from .preserved import fresh, preserved
from .small_sizes import guards_of_small_sizes

if TYPE_CHECKING:
    from ..capture.model.captured import Autocast, Captured

GRADIENT_TOLERANCE = 1e-6  # the exporter may reorder a sum of gradients
# A fraction of the norm of all gradients together. A gradient that is zero up to rounding, such as that of the bias of
# attention keys, keeps no digit when its sum is reordered.
GRADIENT_NOISE = torch.finfo(torch.float32).eps


def rejected(model: nn.Module, call: CallSpec, flat: Sequence[Any], error: Exception) -> RejectedError:
    """Return the error for example inputs that the model itself rejects; name those in a dtype no parameter has."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    floats = [
        (leaf.name, v.dtype) for leaf, v in zip(call.leaves, flat, strict=True) if leaf.tensor and v.is_floating_point()
    ]
    odd = [f"'{name}' is {dtype}" for name, dtype in floats if kinds and dtype not in kinds]
    hint = f" No parameter has the dtype of these inputs: {', '.join(odd)}. Cast them first." if odd else ""
    return RejectedError(
        f"{type(model).__name__} rejects the example inputs: {type(error).__name__}: {error}.{hint} Pass inputs that "
        "model(*args, **kwargs) accepts."
    )


def check_faithful(captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """Compare outputs, inputs and the model's tensors after a call bit for bit, and gradients within 1e-6.

    The model and its graph, without rounding, each run once, in the present state of the model; the model more often if
    its calls may depend on earlier ones (`later.py`). Returns the capture, with a note if less could be compared.

    Raises:
        CaptureError: the model rejects the inputs, or the captured graph computes something else.
    """
    if not captured.plain:
        return captured
    found = captured.unrounded
    model, run = found.model, _caller(found)
    written, tensors = written_parameters(found), held(model)
    by_model: Callable[..., Any] = lambda a, k: model(*a, **k)  # noqa: E731
    bound: Callable[..., Any] = lambda a, k: found.call.pack(run(*found.call.bind(a, k)))  # noqa: E731
    with no_autocast():
        with untouched(model):
            try:
                several, restored = runs_to_compare(
                    found, args, kwargs, written, lambda: _run(by_model, args, kwargs, model, tensors)
                )
            except NotFaithfulError:
                raise
            except Exception as e:
                values = found.call.by_name(args, kwargs)
                flat = pytree.tree_leaves([values[name] for name in found.call.given])
                raise rejected(model, found.call, flat, e) from e
        _refuse_unseen_writes(model, restored, written)
        with preserved(model, written, graph=True):
            got = _run(bound, args, kwargs, model, tensors)
        try:
            for expected in several:
                _compare(type(model).__name__, found.front_end, model, expected, got)
        except NotFaithfulError as e:
            if found.left:
                raise NotFaithfulError(f"{e} forward() sets {', '.join(map(repr, found.left))}.") from e
            raise
    if any(isinstance(o, torch.Tensor) and o.is_meta for o in got.outputs):
        return captured.noting("checked without values: tensors on the meta device have only a shape and a dtype")
    return captured


def _refuse_unseen_writes(model: nn.Module, restored: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
    """Raise NotFaithfulError where forward() wrote to a parameter that the graph does not write to."""
    unseen = {id(t) for t in restored} - {id(t) for t in written}
    for name, parameter in model.named_parameters():
        if id(parameter) in unseen:
            raise NotFaithfulError(f"forward() writes to the parameter '{name}', and the graph would not. {INSTEAD}.")


def runs_under(autocast: Autocast, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a model that rejects its inputs takes them under autocast."""
    try:
        with untouched(model), preserved(model), torch.autocast(autocast.device, autocast.dtype, cache_enabled=False):
            model(*pytree.tree_map(fresh, args), **pytree.tree_map(fresh, kwargs))
    except Exception:  # any exception means that the model does not run
        return False
    return True


def guard_small_sizes(captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """Return the capture with the sizes 1 and 0 guarded where the model branches on them.

    The model is tried on fake tensors, in the state it is in.
    """
    found = captured.unrounded
    if not captured.plain:
        return captured
    run, call = _caller(found), found.call

    def of_model(tensors: list[Any]) -> Any:
        left = iter(tensors)
        flat = [next(left) if leaf.tensor else leaf.constant for leaf in call.leaves]
        given, named = call.arguments(call.unflatten(flat))
        with untouched(found.model):
            return found.model(*given, **named)

    # In fake mode a counter that meets no fake tensor stays a real tensor, and is written: it is restored.
    with no_autocast(), preserved(found.model, written_parameters(found)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a model warns of at small sizes
        tensors = call.bind(args, kwargs)
        guards = guards_of_small_sizes(captured.call, tensors, of_model, lambda flat: run(*flat))
    return replace(captured, call=replace(captured.call, guards=(*captured.call.guards, *guards)))


def _caller(captured: Captured) -> Callable[..., Any]:
    """Return a function that runs a captured graph on flat tensors, over the model's own parameters."""
    root = skeleton(captured.model, captured.opaque, captured.constants)
    holder = GraphModule(nn.Module(), Graph())  # empty: GraphModule cannot copy children of every name
    holder.__dict__.update({k: root.__dict__[k] for k in ("_modules", "_parameters", "_buffers", "training")})
    with called_by_name(captured.graph), read_directly(captured.graph):
        object.__setattr__(holder, "graph", captured.graph)  # a child module may be named "graph"
    return holder


def check_runs(module: ConvertedModule, captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a converted module once on the example inputs, where they are on the device that it was made for.

    Raises:
        VerificationError: an op raises an error that its fake kernel did not; names the node and the way out.
    """
    model = captured.model
    leaves = [*pytree.tree_leaves((args, kwargs)), *model.parameters()]
    if {t.device.type for t in leaves if isinstance(t, torch.Tensor)} - {module.device_type}:
        return
    with untouched(model), preserved(model, written_parameters(captured), graph=True):
        try:
            module(*pytree.tree_map(fresh, args), **pytree.tree_map(fresh, kwargs))
        except FxampError:
            raise
        except Exception as e:
            failed = _failed(module.graph, e)
            raise VerificationError(
                f"{type(model).__name__} runs, but the converted module does not: {_described(failed)}: "
                f"{type(e).__name__}: {e}. {_remedy(failed)}, or pass check=False to convert for a device that has a "
                "kernel for it."
            ) from e


def _failed(graph: Graph, error: Exception) -> Node | None:
    """Return the node that was running when an error was raised, if that is known."""
    lines = [f.line or "" for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith("<eval_with_key")]
    name = lines[-1].partition(" = ")[0].strip() if lines else ""
    return next((n for n in graph.nodes if n.name == name), None)


def _described(node: Node | None) -> str:
    if node is None:
        return "one of its ops failed"
    return f"{ops.name(node)} in module '{module_path(node)}' ({source(node) or 'no source line'})"


def _remedy(node: Node | None) -> str:
    """Say which override gives an op that failed the other dtype: low if it has only FP32 operands, else FP32."""
    held = set() if node is None else {dtypes_of(n.meta.get("val")) for n in node.all_input_nodes}
    if torch.float32 in held and held.isdisjoint(LOW_DTYPES):
        return "Run that op or its module low (ops.NAME=low, modules.PATH=low)"
    return "Keep that op or its module in FP32 (ops.NAME=fp32, modules.PATH=fp32)"


def written_parameters(captured: Captured) -> list[torch.Tensor]:
    """Return the parameters, and lifted constants, that a graph writes to, such as an embedding's with max_norm."""
    sets = Aliases(captured.graph).sets().values()
    targets = {str(n.target) for together in sets for n in together if n.op == "get_attr"}
    constants = {constant_target(name): value for name, value in captured.constants.items()}
    named = dict(captured.model.named_parameters(remove_duplicate=False)) | constants
    return [t for name, t in named.items() if name in targets and isinstance(t, torch.Tensor)]


class _Run(NamedTuple):
    """The results of one call: output leaves, gradients of a weighted sum of them, and the tensors that it wrote to.

    The gradients are None where the model's own backward fails.
    """

    outputs: list[Any]
    gradients: list[Any] | None
    state: dict[str, torch.Tensor]


def _run(
    call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module, tensors: dict[str, torch.Tensor]
) -> _Run:
    """Call once, on copies of the inputs."""
    args, kwargs = pytree.tree_map(fresh, (args, kwargs))
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    inputs, parameters = [t for t in given if t.requires_grad], [p for p in model.parameters() if p.requires_grad]
    leaves = pytree.tree_leaves(call(args, kwargs))
    floats = [o for o in leaves if isinstance(o, torch.Tensor) and o.is_floating_point() and o.requires_grad]
    gradients = _gradients(floats, [*parameters, *inputs])
    state = {f"input {i}": t for i, t in enumerate(given)} | {f"'{name}'": t for name, t in tensors.items()}
    copies = [o.detach().clone() if isinstance(o, torch.Tensor) else o for o in leaves]
    return _Run(copies, gradients, {name: t.detach().clone() for name, t in state.items()})


def _gradients(floats: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> list[Any] | None:
    """Return the gradients of a sum of outputs in which each number has another weight; None without a backward.

    Such a model is only for inference: it overwrites values that its own backward needs.
    """
    if not floats or not sources or not torch.is_grad_enabled():
        return [None] * len(sources)
    weights = [
        torch.linspace(0.5, 1.5, max(o.numel(), 1), dtype=o.dtype, device=o.device)[: o.numel()].view(o.shape)
        for o in floats
    ]
    try:
        return list(torch.autograd.grad(floats, sources, weights, allow_unused=True))
    except RuntimeError:
        return None


def _compare(name: str, front_end: str, model: nn.Module, expected: _Run, got: _Run) -> None:
    way_out = f"The graph captured with '{front_end}' does not compute what {name} computes"
    if len(expected.outputs) != len(got.outputs):
        raise NotFaithfulError(f"{way_out}: {len(got.outputs)} outputs instead of {len(expected.outputs)}. {INSTEAD}.")
    for i, (a, b) in enumerate(zip(expected.outputs, got.outputs, strict=True)):
        if isinstance(a, CONSTANTS) and not same_constant(a, b) and a == a:
            raise NotFaithfulError(f"{way_out}: output {i} is {b!r} instead of {a!r}. {INSTEAD}.")
        if isinstance(a, torch.Tensor) and not (isinstance(b, torch.Tensor) and same(a, b)):
            difference = (
                (a.double() - b.double()).abs().max().item()
                if isinstance(b, torch.Tensor) and a.shape == b.shape and a.numel() and not (a.is_meta or b.is_meta)
                else "shape"
            )
            raise NotFaithfulError(
                f"{way_out}: output {i} differs by {difference}. Capture has lost a part of the model (a side effect, "
                f"a random draw, a branch). {INSTEAD}, or pass check=False if the model has its own random generator."
            )
    for where, value in expected.state.items():
        if where not in got.state or not same(value, got.state[where]):
            raise NotFaithfulError(f"{way_out}: the graph leaves other values in {where}. {INSTEAD}.")
    _compare_gradients(way_out, model, expected.gradients, got.gradients)


def _compare_gradients(way_out: str, model: nn.Module, expected: list[Any] | None, got: list[Any] | None) -> None:
    if expected is None:
        return
    if got is None:
        raise NotFaithfulError(f"{way_out}: the graph's backward raises an error, and the model's does not. {INSTEAD}.")
    named = [n for n, p in model.named_parameters() if p.requires_grad]
    noise = GRADIENT_NOISE * _norm([g for g in expected if g is not None and not g.is_meta])
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        where = f"parameter '{named[i]}'" if i < len(named) else f"input {i - len(named)}"
        if (a is None) != (b is None):
            change = "lost" if b is None else "new"
            raise NotFaithfulError(f"{way_out}: the gradient of {where} is {change}. {INSTEAD}.")
        if a is not None and not _close(a, b, noise):
            raise NotFaithfulError(f"{way_out}: the gradient of {where} differs. {INSTEAD}.")


def _norm(gradients: list[torch.Tensor]) -> float:
    """Return the norm of all gradients together; 0 if one of them is not finite."""
    dense = [g.to_dense() if g.is_sparse else g for g in gradients]
    norm = sum(float(g.abs().double().norm()) ** 2 for g in dense)
    return norm**0.5 if math.isfinite(norm) else 0.0


def _close(a: torch.Tensor, b: torch.Tensor, noise: float) -> bool:
    if a.is_meta:
        return same(a, b)
    if a.is_sparse or b.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    scale = a.double().norm().clamp_min(1e-30)
    difference = (a.double() - b.double()).norm() / scale
    return bool(difference <= GRADIENT_TOLERANCE) or bool(difference * scale <= noise) or same(a, b)
