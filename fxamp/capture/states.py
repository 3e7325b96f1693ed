"""One capture for every state that a model has: in training and in evaluation, with and without gradients.

Captures that compute the same are merged into one graph, whose literals follow the training flags; the others stay
graphs of their own, and the converted module chooses at the call. The two grad modes are captured separately only if
the program was seen to query the grad mode.

The user's module is left unchanged, also after an error.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from passes.contract.errors import CaptureError, NotAModuleError
from passes.graph.notes import note, note_of
from passes.graph.values import no_autocast

from ..module.module import ConvertedModule
from ..trust.preserved import same_random_state
from . import capture_fx, front_ends
from .export import program_module
from .front_ends import Run
from .merge import follows_mode, merge, same_graphs
from .model.call import CallSpec, both, example_call, signature_of
from .model.captured import Autocast, Captured, Captures, State, as_inputs
from .model.dims import program_dims
from .model.patches import capturing, uncollected
from .model.preflight import refuse_compiled, refuse_modules
from .model.reads import Reads

logger = logging.getLogger("fxamp")
FRONT_ENDS = ("auto", "fx", "export", "jit")  # "jit" is `fxamp/dynamo`


def capture(
    model: nn.Module | ExportedProgram,
    args: Any = None,
    kwargs: Any = None,
    *,
    front_end: str = "auto",
    dynamic_shapes: Any = "auto",
    autocast: Autocast | None = None,
    module: nn.Module | None = None,
) -> Captures:
    """Capture a model in every state that it has.

    Args:
        model: is not changed.
        args: example inputs, a tuple.
        kwargs: example keyword inputs.
        front_end: "fx", "export" or "auto".
        dynamic_shapes: "auto", None, or as `torch.export.export` takes it.
        autocast: captures by `export` are compared with ones under this autocast; None compares nothing, as at O0.
        module: what `module_of` returned for the model, if it was called.

    Raises:
        NotAModuleError: `model` is not a module.
        CaptureError: the front end cannot capture it faithfully; names the construct and the way out.
    """
    if front_end not in FRONT_ENDS:
        raise CaptureError(f"capture={front_end!r} is not one of {', '.join(FRONT_ENDS)}.")
    module = module_of(model) if module is None else module
    inputs = as_inputs(args, kwargs)
    if front_end == "auto":
        front_end = "fx" if inputs is None else "export"
    if front_end == "export" and inputs is None:
        raise CaptureError("capture='export' needs example inputs: fxamp.convert(model, args, kwargs).")
    refuse_modules(module, front_end)
    call, flat = _call_of(module, inputs)
    reads = Reads()
    with capturing(), no_autocast(), same_random_state(), uncollected():
        random.seed(random.getrandbits(64))  # or the check would not notice a random number in the graph
        if front_end == "export":
            if isinstance(model, ExportedProgram) and dynamic_shapes == "auto":
                dynamic_shapes = program_dims(model)  # the exported program has fixed its dimensions
            again = not isinstance(model, ExportedProgram)
            run = front_ends.by_export(module, call, flat, dynamic_shapes, autocast, reads, again=again)
        else:
            run = front_ends.by_fx(module, call, flat, reads)
        captures = _as_it_is(module, run) if isinstance(model, ExportedProgram) else _all_states(module, run)
    return replace(captures, reads=reads)


def module_of(model: Any) -> nn.Module:
    """Return the module to capture, that of an ExportedProgram too.

    Raises:
        NotAModuleError: there is none.
        CaptureError: it is converted or compiled already, or a module in it is.
    """
    module = program_module(model) if isinstance(model, ExportedProgram) else model
    refuse_non_models(module)
    refuse_compiled(module)
    return module


def refuse_non_models(model: Any) -> None:
    """Raise NotAModuleError or CaptureError for anything that is not a model, or is converted already."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}: make an instance" if isinstance(model, type) else type(model).__name__
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


def _as_it_is(model: nn.Module, run: Run) -> Captures:
    """Capture with the present training flags; calls with other flags are refused if the graph depends on them."""
    captured = run()
    if follows_mode(captured.graph):
        now = State({path: m.training for path, m in model.named_modules()})
        note = "an ExportedProgram's training mode was fixed when it was exported"
        captured = replace(captured.noting(note), state=now)
    return Captures((captured,))


def _all_states(model: nn.Module, run: Run) -> Captures:
    """Capture in train and in eval mode, and with and without gradients if the program reads the grad mode."""
    now, grad = model.training, torch.is_grad_enabled()
    missing: list[tuple[State, str]] = []

    def attempt(training: bool, gradients: bool) -> Captured | None:
        try:
            return _in_state(model, run, training, gradients)
        except CaptureError as e:
            state = State(dict.fromkeys(_paths(model), training), gradients if gradients is not grad else None)
            logger.warning("fxamp: %s is not captured for %s: %s", type(model).__name__, state, str(e).split("\n")[0])
            missing.append((state, str(e)))
            return None

    # Both training modes always: a flag can be read in ways that nothing sees.
    found: dict[bool, tuple[Captured | None, Captured | None]] = {}
    found[grad] = _in_state(model, run, now, grad), attempt(not now, grad)
    asked = [place for captured in found[grad] if captured is not None for place in captured.grad_reads]
    if asked:
        found[not grad] = attempt(now, not grad), attempt(not now, not grad)
    by_grad = {mode: _merged(model, run, mode, *pair) for mode, pair in found.items()}
    graphs = by_grad[grad]
    if asked:
        graphs = _apart(by_grad[grad], by_grad[not grad], grad)
    graphs.sort(key=lambda c: not _holds(c.state, model, grad))  # the graph of the present state comes first
    return Captures(tuple(graphs), tuple(missing))


def _in_state(model: nn.Module, run: Run, training: bool | None, gradients: bool) -> Captured:
    """Capture with all training flags set to one value (None leaves them as they are), and in a grad mode."""
    flags = {m: m.training for m in model.modules()}
    for m in flags:
        m.training = m.training if training is None else training
    try:
        with torch.set_grad_enabled(gradients):
            return run()
    finally:
        for m, flag in flags.items():
            m.training = flag


def _paths(model: nn.Module) -> list[str]:
    return [path for path, _ in model.named_modules()]


def _merged(model: nn.Module, run: Run, grad: bool, present: Captured | None, other: Captured | None) -> list[Captured]:
    """Return one capture for both training modes, or one for each mode that was captured."""
    now = model.training
    if present is not None and present is other:
        return [present]
    if present is not None and other is not None:
        train, evaluation = (present, other) if now else (other, present)
        try:
            return [_one(train, evaluation)]
        except CaptureError as e:
            logger.info("fxamp: %s has a graph for each training mode: %s", type(model).__name__, e)
    pairs = ((present, now), (other, not now))
    found = [replace(c, state=State(dict.fromkeys(_paths(model), flag))) for c, flag in pairs if c is not None]
    flags = {path: m.training for path, m in model.named_modules()}
    if len(set(flags.values())) > 1:  # some layers are in eval mode: neither graph is for that
        found.insert(0, replace(_in_state(model, run, None, grad), state=State(flags)))
    return found


def _one(train: Captured, evaluation: Captured) -> Captured:
    """Merge the captures of both training modes.

    Raises:
        CaptureError: they compute differently.
    """
    graph = merge(copy.deepcopy(train.graph), evaluation.graph, train.constants, evaluation.constants)
    without = None
    if train.without is not None or evaluation.without is not None:
        without = _one(train.unrounded, evaluation.unrounded)
    reads = tuple(dict.fromkeys((*train.grad_reads, *evaluation.grad_reads)))
    return replace(
        train, graph=graph, call=_joined(train.call, evaluation.call), without=without, grad_reads=reads,
        notes=tuple(sorted({*train.notes, *evaluation.notes})), plain=train.plain and evaluation.plain,
    )  # fmt: skip


def _joined(train: CallSpec, evaluation: CallSpec) -> CallSpec:
    """Return a call specification with the requirements of both captures on the inputs."""
    if train.out_spec != evaluation.out_spec or train.out_constants != evaluation.out_constants:
        raise CaptureError("the model returns one thing in train mode and another in eval mode")
    return both(train, evaluation)


def _apart(ours: list[Captured], others: list[Captured], grad: bool) -> list[Captured]:
    """Return the captures of both grad modes; one capture for both if they compute the same."""
    out = []
    left = list(others)
    for captured in ours:
        twin = next((c for c in left if c.state == captured.state and _same(captured, c)), None)
        if twin is not None:
            left.remove(twin)
            out.append(replace(captured, call=both(captured.call, twin.call)))
        else:
            out.append(replace(captured, state=replace(captured.state, grad=grad)))
    return out + [replace(c, state=replace(c.state, grad=not grad)) for c in left]


def _same(a: Captured, b: Captured) -> bool:
    outputs = (a.call.out_spec, a.call.out_constants) == (b.call.out_spec, b.call.out_constants)
    return (
        outputs
        and (a.without is None) == (b.without is None)
        and same_graphs(a.graph, b.graph, a.constants, b.constants)
    )


def _holds(state: State, model: nn.Module, grad: bool) -> bool:
    flags = state.flags is None or all(m.training is state.flags[path] for path, m in model.named_modules())
    return flags and state.grad in (None, grad)


@contextlib.contextmanager
def in_state_of(captured: Captured) -> Iterator[None]:
    """Put a model into a state that a capture of it holds for; afterwards its own state is restored."""
    flags = {m: m.training for m in captured.model.modules()}
    for path, module in captured.model.named_modules():
        if captured.state.flags is not None:
            module.training = captured.state.flags[path]
    grad = torch.is_grad_enabled() if captured.state.grad is None else captured.state.grad
    try:
        with torch.set_grad_enabled(grad):
            yield
    finally:
        for m, flag in flags.items():
            m.training = flag


def with_own_constants(captures: Sequence[Captured]) -> list[Captured]:
    """Return captures whose lifted constants have names that no other has; graphs are pointed to them in place."""
    out = []
    for at, captured in enumerate(captures):
        names = {name: name if at == 0 else f"state{at}_{name}" for name in captured.constants}
        for node in captured.graph.nodes if at else ():
            if node.op == "get_attr" and str(node.target).startswith("_fxamp."):
                node.target = f"_fxamp.{names[str(node.target).removeprefix('_fxamp.')]}"
            if read := note_of(node).constant_read:
                note(node, constant_read=f"_fxamp.{names[read.removeprefix('_fxamp.')]}")
        out.append(replace(captured, constants={names[name]: value for name, value in captured.constants.items()}))
    return out


def copied(captures: Captures) -> Captures:
    """Return a copy to compile: graphs are changed in place, also those inside higher-order ops."""
    return replace(captures, graphs=tuple(_copied(c) for c in captures.graphs))


def _copied(captured: Captured) -> Captured:
    constants = {k: copy.deepcopy(v) if isinstance(v, GraphModule) else v for k, v in captured.constants.items()}
    without = captured.without and _copied(captured.without)
    return replace(captured, graph=copy.deepcopy(captured.graph), constants=constants, without=without)
