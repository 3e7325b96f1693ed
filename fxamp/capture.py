"""From `nn.Module` to one flat FX graph that serves both training modes, by the front end asked for.

The user's module is as it was when this returns, or raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph

from passes.errors import CaptureError, FxampError, NotAModuleError
from passes.legalize import inline_regions
from passes.values import no_autocast

from . import capture_export, capture_fx
from .call import CallSpec, signature_of
from .modes import merge
from .module import ConvertedModule
from .preflight import refuse_constructs, refuse_hooks, untouched

logger = logging.getLogger("fxamp")
FRONT_ENDS = ("auto", "fx", "export", "jit")


@dataclass
class Captured:
    """A captured model: a flat graph, and what its get_attr and call_module targets refer to beside the model."""

    graph: Graph
    call: CallSpec
    front_end: str
    opaque: dict[str, nn.Module] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    only_mode: bool | None = None
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


def capture(model: nn.Module, args: Any = None, kwargs: Any = None, *, front_end: str = "auto", dynamic_shapes: Any = "auto") -> Captured:
    """Capture a model into one graph for both training modes.

    Raises:
        NotAModuleError: `model` is not a module.
        CaptureError: the front end cannot capture it faithfully; names the construct and the way out.
    """
    if front_end not in FRONT_ENDS:
        raise CaptureError(f"capture={front_end!r} is not one of {', '.join(FRONT_ENDS)}.")
    if front_end == "jit":
        raise CaptureError("capture='jit' is not supported yet. Use capture='export' with example inputs, or 'fx'.")
    if isinstance(model, ExportedProgram):
        model = capture_export.program_parts(model)
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}; call it first" if isinstance(model, type) else type(model).__name__
        raise NotAModuleError(f"fxamp converts a torch.nn.Module, a GraphModule or an ExportedProgram, not {kind}.")
    if isinstance(model, ConvertedModule):
        raise CaptureError("this module is converted already. Convert the original model, or read fxamp.plan_of(module).")
    if any(isinstance(m, ConvertedModule) for m in model.modules()):
        inner = next(p for p, m in model.named_modules() if isinstance(m, ConvertedModule))
        raise CaptureError(f"submodule '{inner}' is converted already. Convert the whole of the original model instead.")
    inputs = as_inputs(args, kwargs)
    if front_end == "auto":
        front_end = "fx" if inputs is None else "export"
    if front_end == "export" and inputs is None:
        raise CaptureError("capture='export' needs example inputs: fxamp.convert(model, args, kwargs).")
    refuse_hooks(model, front_end)
    call = signature_of(model.forward)
    run = _by_export(model, call, inputs, dynamic_shapes) if front_end == "export" else _by_fx(model, call, inputs)
    with no_autocast():
        captured = _both_modes(model, run)
    captured.model = model
    return captured


def _by_export(model: nn.Module, call: CallSpec, inputs: Any, dynamic_shapes: Any) -> Callable[[], Captured]:
    try:
        call, flat = capture_export.example_call(call, *inputs)
    except TypeError as e:
        raise CaptureError(f"{type(model).__name__} rejects the example inputs: {e}.") from e
    dims = capture_export.dynamic_dims(dynamic_shapes, call, *inputs, flat)

    def run() -> Captured:
        try:
            with refuse_constructs("export"), untouched(model):
                gm, spec = capture_export.export(model, call, flat, dims)
        except CaptureError:
            _reject_inputs(model, *inputs)
            raise
        graph, constants = capture_export.normalise(gm, model)
        inline_regions(graph, constants)
        return Captured(graph, spec, "export", {}, constants)

    return run


def _by_fx(model: nn.Module, call: CallSpec, inputs: Any) -> Callable[[], Captured]:
    if inputs is None:
        call = capture_fx.given_by_default(call)
    else:
        call, _ = capture_export.example_call(call, *inputs)
        call = replace(call, in_spec=None)

    def run() -> Captured:
        with refuse_constructs("fx"), untouched(model):
            graph, spec, leaves, constants = capture_fx.trace(model, call)
        return Captured(graph, spec, "fx", leaves, constants)

    return run


def _reject_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """When capture failed: if the model itself rejects the example inputs, say that instead."""
    with untouched(model), torch.no_grad():
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        state = torch.get_rng_state()
        try:
            model(*args, **kwargs)
        except FxampError:
            raise
        except Exception as e:
            raise CaptureError(
                f"{type(model).__name__} rejects the example inputs: {type(e).__name__}: {e}. Pass inputs that model(*args, "
                "**kwargs) accepts."
            ) from e
        finally:
            torch.set_rng_state(state)
            for n, b in model.named_buffers():
                b.data.copy_(buffers[n])


def _both_modes(model: nn.Module, run: Callable[[], Captured]) -> Captured:
    """Capture in train and in eval mode and merge; fall back on the present mode alone where that cannot be done."""
    flags = {m: m.training for m in model.modules()}
    baked = isinstance(model, torch.fx.GraphModule)

    def in_mode(training: bool) -> Captured:
        for m in flags:
            m.training = training
        try:
            return run()
        finally:
            for m, flag in flags.items():
                m.training = flag

    if baked:
        return run()
    present = in_mode(model.training)
    try:
        other = in_mode(not model.training)
        train, evaluation = (present, other) if model.training else (other, present)
        merge(train.graph, evaluation.graph)
        train.constants = {**evaluation.constants, **train.constants}
        return train
    except CaptureError as e:
        kept = "train" if model.training else "eval"
        logger.warning("%s is captured in %s mode only: %s", type(model).__name__, kept, e)
        single = in_mode(model.training)
        single.only_mode = model.training
        single.notes.append(f"captured in {kept} mode only: {e}")
        return single
