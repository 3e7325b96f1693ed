"""From `nn.Module` to one flat FX graph that serves both training modes, by the front end asked for.

The user's module is as it was when this returns, or raises.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph

from passes.errors import CaptureError, FxampError, NotAModuleError, NotFaithfulError
from passes.values import no_autocast

from . import capture_export, capture_fx
from .call import CallSpec, example_call, signature_of
from .check import preserved, rejected, same_random_state
from .modes import follows_mode, merge
from .module import ConvertedModule
from .preflight import grad_mode_reads, refuse_assigned, refuse_constructs, refuse_modules, untouched
from .tensors import held, kept

logger = logging.getLogger("fxamp")
FRONT_ENDS = ("auto", "fx", "export", "jit")  # the last is `dynamo`


@dataclass
class Captured:
    """A captured model: a flat graph, and what its get_attr and call_module targets refer to beside the model.

    `only_mode` is None for a graph that serves both modes, else the training flag that each module had, by path.
    `only_grad` is the grad mode that the graph was captured in, by training flag, where the model asks for that.
    """

    graph: Graph
    call: CallSpec
    front_end: str
    opaque: dict[str, nn.Module] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    only_mode: dict[str, bool] | None = None
    only_grad: dict[bool, bool] = field(default_factory=dict)
    model: nn.Module = field(default_factory=nn.Module)


def as_inputs(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Normalise example inputs; None when there are none."""
    if args is None and kwargs is None:
        return None
    if isinstance(args, torch.Tensor):
        args = (args,)
    if args is None:
        args = ()
    if not isinstance(args, (tuple, list)):
        raise CaptureError(f"args is a tuple of example inputs, not {type(args).__name__}; write (x,) for one input.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CaptureError(f"kwargs is a dict of example inputs, not {type(kwargs).__name__}.")
    return tuple(args), dict(kwargs or {})


def capture(
    model: nn.Module | ExportedProgram,
    args: Any = None,
    kwargs: Any = None,
    *,
    front_end: str = "auto",
    dynamic_shapes: Any = "auto",
) -> Captured:
    """Capture a model into one graph for both training modes.

    Raises:
        NotAModuleError: `model` is not a module.
        CaptureError: the front end cannot capture it faithfully; names the construct and the way out.
    """
    if front_end not in FRONT_ENDS:
        raise CaptureError(f"capture={front_end!r} is not one of {', '.join(FRONT_ENDS)}.")
    baked = isinstance(model, ExportedProgram)
    module = capture_export.program_module(model) if isinstance(model, ExportedProgram) else model
    refuse_non_models(module)
    inputs = as_inputs(args, kwargs)
    if front_end == "auto":
        front_end = "fx" if inputs is None else "export"
    if front_end == "export" and inputs is None:
        raise CaptureError("capture='export' needs example inputs: fxamp.convert(model, args, kwargs).")
    refuse_modules(module, front_end)
    call, flat = _call_of(module, inputs)
    run = _by_export(module, call, flat, dynamic_shapes) if front_end == "export" else _by_fx(module, call, flat)
    with no_autocast(), same_random_state():
        random.seed(random.getrandbits(64))  # a draw that is baked in must not be the one that the check makes
        captured = _as_it_is(module, run) if baked else _both_modes(module, run)
    captured.model = module
    return captured


def refuse_non_models(model: Any) -> None:
    """Raise NotAModuleError or CaptureError for what is no model, or is converted already."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}; call it first" if isinstance(model, type) else type(model).__name__
        raise NotAModuleError(f"fxamp converts a torch.nn.Module, a GraphModule or an ExportedProgram, not {kind}.")
    for path, module in model.named_modules():
        if isinstance(module, ConvertedModule):
            what = f"submodule '{path}' is" if path else "this module is"
            raise CaptureError(f"{what} converted already. Convert the original model, or read fxamp.plan_of(module).")


def _call_of(model: nn.Module, inputs: Any) -> tuple[CallSpec, list[Any]]:
    call = signature_of(model.forward)
    if inputs is None:
        return capture_fx.given_by_default(call), []
    try:
        return example_call(call, *inputs)
    except TypeError as e:
        raise CaptureError(f"{type(model).__name__} rejects the example inputs: {e}.") from e


def _by_export(model: nn.Module, call: CallSpec, flat: list[Any], dynamic_shapes: Any) -> Callable[[], Captured]:
    dims = capture_export.dynamic_dims(dynamic_shapes, call, flat)

    def run() -> Captured:
        try:
            with kept(held(model).values()), refuse_constructs("export"), untouched(model), grad_mode_reads() as asked:
                gm, spec, changed = capture_export.export(model, call, flat, dims)
        except FxampError:
            raise
        except Exception as e:
            _refuse_inputs(model, call, flat)
            raise NotFaithfulError(capture_export.explain(model, e)) from e
        graph, constants = capture_export.normalise(gm, model)
        lifted = {id(c) for c in constants.values()}
        refuse_assigned(changed, [name for name, t in held(model).items() if id(t) in lifted], "export")
        notes = _side_effects(changed) + _grad_mode_notes(asked)
        return Captured(graph, spec, "export", {}, constants, notes, only_grad=_only_grad(model, asked))

    return run


def _by_fx(model: nn.Module, call: CallSpec, flat: list[Any]) -> Callable[[], Captured]:
    def run() -> Captured:
        with (
            kept(held(model).values()), refuse_constructs("fx"), untouched(model) as changed, grad_mode_reads() as asked
        ):  # fmt: skip
            graph, spec, leaves, constants = capture_fx.trace(model, call, flat)
        notes = _side_effects(changed) + _grad_mode_notes(asked)
        return Captured(graph, spec, "fx", leaves, constants, notes, only_grad=_only_grad(model, asked))

    return run


def _side_effects(changed: list[str]) -> list[str]:
    return [f"forward() sets '{name}', which the converted module does not" for name in sorted(changed)]


def _grad_mode_notes(asked: list[str]) -> list[str]:
    return [f"the grad mode is read at {place}" for place in dict.fromkeys(asked)]


def _only_grad(model: nn.Module, asked: list[str]) -> dict[bool, bool]:
    """Return the grad mode that a capture holds for, where the model asks for it: each answer may have its branch."""
    return {model.training: torch.is_grad_enabled()} if asked else {}


def _refuse_inputs(model: nn.Module, call: CallSpec, flat: list[Any]) -> None:
    """When capture failed: if the model itself rejects the example inputs, say that instead."""
    args, kwargs = call.arguments(call.unflatten(flat))
    with untouched(model), preserved(model):
        try:
            model(*args, **kwargs)
        except Exception as e:
            raise rejected(model, call, flat, e) from e


def _as_it_is(model: nn.Module, run: Callable[[], Captured]) -> Captured:
    """Capture with the training flags that the modules have; refuse others later, where the graph depends on them."""
    captured = run()
    if follows_mode(captured.graph):
        captured.only_mode = {path: m.training for path, m in model.named_modules()}
        captured.notes.append("an ExportedProgram's training mode was fixed when it was exported")
    return captured


def _both_modes(model: nn.Module, run: Callable[[], Captured]) -> Captured:
    """Capture in train and in eval mode and merge; fall back on the flags as they are where that cannot be done."""
    flags = {m: m.training for m in model.modules()}

    def in_mode(training: bool) -> Captured:
        for m in flags:
            m.training = training
        try:
            return run()
        finally:
            for m, flag in flags.items():
                m.training = flag

    present = in_mode(model.training)
    try:
        other = in_mode(not model.training)
        train, evaluation = (present, other) if model.training else (other, present)
        graph = merge(copy.deepcopy(train.graph), evaluation.graph, train.constants, evaluation.constants)
        call = _joined(train.call, evaluation.call)
    except CaptureError as e:
        logger.warning("fxamp: %s is captured for the training flags it has: %s", type(model).__name__, e)
        mixed = any(flag is not model.training for flag in flags.values())
        single = run() if mixed else present
        single.only_mode = {path: m.training for path, m in model.named_modules()}
        single.notes.append(f"captured for the training flags it has: {e}")
        return single
    notes, only_grad = sorted({*train.notes, *evaluation.notes}), {**train.only_grad, **evaluation.only_grad}
    return replace(train, graph=graph, call=call, notes=notes, only_grad=only_grad)


def _joined(train: CallSpec, evaluation: CallSpec) -> CallSpec:
    """Return a call specification that asks of the inputs what both captures ask."""
    if train.out_spec != evaluation.out_spec or train.out_constants != evaluation.out_constants:
        raise CaptureError("the model returns one thing in train mode and another in eval mode")
    leaves = tuple(
        replace(a, static=tuple(sorted({*a.static, *b.static})))
        for a, b in zip(train.leaves, evaluation.leaves, strict=True)
    )
    return replace(train, leaves=leaves, guards=tuple(dict.fromkeys((*train.guards, *evaluation.guards))))
