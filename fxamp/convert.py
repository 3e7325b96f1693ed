"""`convert`, from end to end: capture a model, compile its graphs, emit the converted module."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.export import ExportedProgram

from passes import compile_graph
from passes._torch import original_of, pytree
from passes.contract.devices import DEVICES
from passes.contract.errors import (
    CaptureError,
    NotAModuleError,
    NotFaithfulError,
    PlanError,
    PolicyError,
    RejectedError,
)
from passes.contract.plan import Plan, joined
from passes.contract.plan_format import REMEDY
from passes.contract.policy import Policy
from passes.contract.timing import Timer
from passes.graph.values import LOW_DTYPES

from .capture.compare import attribute_of
from .capture.front_ends import ALONE
from .capture.functions import as_under_autocast
from .capture.model.captured import Autocast, Captured, Captures, as_inputs
from .capture.model.fused import note_fused
from .capture.model.patches import capturing, uncollected
from .capture.model.preflight import loads_otherwise, refuse_wrapped
from .capture.model.snapshot import untouched
from .capture.states import capture as capture_model
from .capture.states import in_state_of, module_of, refuse_non_models, with_own_constants
from .dynamo import compiled
from .dynamo.backend import Inner, backend_of, refuse_unmatched, split
from .dynamo.resolve import device_of, resolve
from .measure.fastest import emit_measured, kept_notes
from .module.kept import Kept
from .module.module import ConvertedModule, Variant
from .module.parameters import only_read, opaque_parameters, refuse_low_parameters
from .module.skeleton import skeleton
from .trust.check import (
    check_faithful,
    check_runs,
    guard_small_sizes,
    runs_under,
)
from .trust.preserved import fresh, preserved
from .view.capture import capture as capture_view
from .view.graphs import bound, entries_of
from .view.view import make_view, runner_of

logger = logging.getLogger("fxamp")


def convert(
    model: nn.Module,
    args: Any = None,
    kwargs: Any = None,
    *,
    policy: Policy | str | None = None,
    capture: str = "auto",
    dynamic_shapes: Any = "auto",
    plan: Plan | str | os.PathLike[str] | None = None,
    check: bool = True,
) -> Any:
    """Convert a model to mixed precision, ahead of time.

    With example inputs their shapes are known, and the captured graph is compared with the model bit for bit: the model
    runs once, its captured graph once, and the converted module once. Without inputs the model is traced symbolically.

    Args:
        model: An `nn.Module` with FP32 parameters (frozen ones may be FP16 or BF16), a `GraphModule` or an
            `ExportedProgram`. The model is not changed. The converted module shares its parameters and buffers, so an
            optimizer that was built before keeps working.
        args: Example inputs, a tuple as `torch.export.export` takes them (a lone tensor is wrapped), with the shapes
            and dtypes of real inputs. With a batch of at least 2 the batch dimension stays dynamic.
        kwargs: Example keyword inputs.
        policy: A level ("O0" to "O3"), a policy string ("O2,dtype=bf16,modules.fc3=fp32") or a Policy; "O1" by default.
        capture: "export" captures with `torch.export`, "fx" by symbolic tracing, and "jit" with `torch.compile` at the
            first call; its graphs then run eagerly. "auto" is "export" with example inputs, else "fx"; if that front
            end would lose a part of the model, "jit" is used instead, and a log line says why.
        dynamic_shapes: "auto" makes every dimension dynamic. If that fails or exceeds a limit, only the first dimension
            of each input is dynamic, and the plan says so. The limits are 4 s of processor time plus 0.25 ms for each
            call of torch, and 96 operations in the expression of one guard on sizes. None makes all sizes static. Any
            other value is passed to `torch.export.export`.
        plan: A Plan, or the path of one, to replay; its policy is used, so do not give `policy` too.
        check: False skips the comparison, and the three runs that it needs.

    Returns:
        A ConvertedModule, called like the model. If the model is captured at its first call, the result of
        `fxamp.compile`. Outputs have the shapes and dtypes of the model's outputs.

    Raises:
        CaptureError: The model cannot be captured or, unless `capture` is "auto", cannot be captured faithfully.
        NotAModuleError: `model` is not a module.
        PolicyError: The policy is wrong, or does not fit the model.
        PlanError: The plan cannot be read, or does not fit the model.
        VerificationError: A rewritten graph does not do what its plan says, or has an op without a kernel here.

    Example:
        >>> converted = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
        >>> converted(x).shape, converted(x).dtype
        (torch.Size([3, 4]), torch.float32)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     bool((converted(x) == model(x)).all())
        True
    """
    if plan is not None and policy is not None:
        raise PolicyError("a plan has its own policy: give convert a plan or a policy, not both.")
    if plan is not None and not isinstance(plan, Plan):
        plan = Plan.load(plan)
    asked = plan.policy if plan is not None else Policy.of(policy)
    if isinstance(model, nn.Module) and not isinstance(model, torch.fx.GraphModule):
        return compile(model, args, kwargs, policy=asked, backend="eager", check=bool(check))
    if capture == "jit":
        return _at_first_call(model, asked, plan, dynamic_shapes)
    try:
        return _ahead_of_time(model, args, kwargs, asked, capture, dynamic_shapes, plan, check)
    except NotFaithfulError as e:
        if capture != "auto" or plan is not None or isinstance(model, ExportedProgram):
            raise
        reason = str(e).split("\n")[0]
        logger.warning("fxamp: %s is captured at its first call, by torch.compile: %s", type(model).__name__, reason)
    return _at_first_call(model, asked, plan, dynamic_shapes)


def _ahead_of_time(
    model: nn.Module, args: Any, kwargs: Any, policy: Policy, front_end: str, dynamic_shapes: Any,
    replayed: Plan | None, check: bool,
) -> ConvertedModule:  # fmt: skip
    with capturing(), uncollected():  # conversions take turns; each leaves a million objects, walked once at its end
        module, inputs = module_of(model), as_inputs(args, kwargs)
        settled = resolve(policy, module, inputs)
        traced = any(isinstance(m, torch.fx.GraphModule) for m in module.modules())
        if not traced:  # nodes of a GraphModule have module paths of their own
            refuse_unmatched(settled, module)  # early, since capture may take long
        autocast = autocast_for(settled, module, inputs)
        captures = capture_model(
            model, args, kwargs, module=module,
            front_end=front_end, dynamic_shapes=dynamic_shapes, autocast=autocast,
        )  # fmt: skip
        present = captures.graphs[0]
        named = dict(present.model.named_parameters())
        notes = (*refuse_low_parameters(named.items(), present.model.training), *opaque_parameters(named.items()))
        captures = replace(captures, graphs=tuple(c.noting(*notes) for c in captures.graphs))
        if not settled.level.rounds:
            _refuse_without_plain(captures)
        if check and inputs is not None:
            with untouched(present.model):
                captures = checked(captures, autocast, *inputs)
                if not isinstance(model, ExportedProgram):  # it has no Python code, which could branch on a size
                    captures = replace(captures, graphs=tuple(_guarded(c, *inputs) for c in captures.graphs))
        if settled.cost == "measured" and replayed is None:
            return emit_measured(captures, settled, inputs, emit)
        converted = emit(captures, settled, replayed)
        if check and inputs is not None:
            check_runs(converted, captures.graphs[0], *inputs)
        return converted


def checked(captures: Captures, autocast: Autocast | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captures:
    """Compare the present graph with the model, unless the model runs only under autocast."""
    try:
        present = check_faithful(captures.graphs[0], args, kwargs)
    except RejectedError as e:
        if autocast is None or not runs_under(autocast, captures.graphs[0].model, args, kwargs):
            raise
        note = ALONE.format(str(e).splitlines()[0])
        return replace(captures, graphs=tuple(replace(c.noting(note), plain=False) for c in captures.graphs))
    return replace(captures, graphs=(present, *captures.graphs[1:]))


def _guarded(captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    with in_state_of(captured):
        return guard_small_sizes(captured, args, kwargs)


def autocast_for(policy: Policy, model: nn.Module, inputs: Any) -> Autocast | None:
    """Return the autocast to capture under for a policy with device and dtype: that of the device that the model is on.

    None where nothing is rounded.
    """
    if not policy.level.rounds or policy.dtype is None:
        return None
    device = device_of(model, inputs)
    if device not in DEVICES or policy.dtype not in LOW_DTYPES:
        return None
    return Autocast(device, policy.dtype, str(policy.device))


def _refuse_without_plain(captures: Captures) -> None:
    for captured in captures.graphs:
        if not captured.plain:
            raise CaptureError(
                "the model runs only under autocast, and O0 means without autocast: choose O1 or higher. "
                f"{captured.notes[-1]}"
            )


def _at_first_call(model: nn.Module, policy: Policy, replayed: Plan | None, dynamic_shapes: Any) -> Any:
    if replayed is not None:
        raise PlanError("a plan is replayed ahead of time: use capture='export' or 'fx' with it, not 'jit'.")
    refuse_non_models(model)
    return compile(model, policy=policy, backend="eager", dynamic=False if dynamic_shapes is None else None)


def compile(
    model: nn.Module,
    args: Any = None,
    kwargs: Any = None,
    *,
    policy: Policy | str | None = None,
    backend: Inner = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    check: bool | str = True,
    on_change: str = "recompile",
    methods: Sequence[str] = (),
) -> Any:
    """Return a view of a model whose calls run in mixed precision, compiled by `torch.compile`.

    The view is an object of a subclass of the model's class over the model's own `__dict__`: parameters, buffers,
    submodules, hooks and attributes are one and the same, and only a call differs. Each call runs the graphs that
    TorchDynamo captures of the model; what Python reads meanwhile is guarded, and a guard that fails captures again.

    Args:
        model: Any module that `torch.compile` takes, with FP32 parameters (frozen ones may have any dtype); it is not
            changed.
        args: Example inputs, with which the present state is captured at once, and checked; without them the model is
            captured at its first call.
        kwargs: Example keyword inputs.
        policy: A level, a policy string or a Policy; "O1" by default.
        backend: The inner backend, which runs the converted graphs: "inductor", "eager", the name of any other, or a
            callable.
        mode: For the inner backend, as `torch.compile` takes it.
        options: For the inner backend.
        fullgraph: As `torch.compile` takes it.
        dynamic: As `torch.compile` takes it. None marks dimension 0 of every tensor argument that shares its size with
            the first one, so that another batch size captures nothing.
        check: Compare the captured graphs, unconverted, with the model, on copies that share its parameters: outputs
            and buffers bit for bit, with True at O0 gradients too. "forward" leaves gradients out, False all of it.
        on_change: What a failing guard does: "recompile", or "error", which raises CaptureError.
        methods: Names of methods that are captured like the call. Other methods run under autocast.

    Returns:
        The view. Outputs have the shapes and dtypes of the model's outputs.

    Raises:
        NotAModuleError: `model` is not a module.
        CaptureError: The model is a view, is wrapped in DataParallel, sharded, or compiled already; or its captured
            graph does not compute what the model computes.
        PolicyError: The policy is wrong, there is no such inner backend, or `options` holds a name that is an argument
            of this function.

    Example:
        >>> compiled = fxamp.compile(model, policy="O2,dtype=bf16", backend="eager")  # "inductor" by default
        >>> compiled(x).shape, compiled(x).dtype
        (torch.Size([3, 4]), torch.float32)
    """
    if not isinstance(model, nn.Module):
        raise NotAModuleError(f"fxamp.compile takes a torch.nn.Module, not {type(model).__name__}.")
    _refuse_second_time(model)
    refuse_wrapped(model)
    if given := split(options)[0]:
        raise PolicyError(
            f"options of fxamp.compile go to the inner backend, and {', '.join(map(repr, given))} are arguments: write "
            "fxamp.compile(model, policy=...)."
        )
    if on_change not in ("recompile", "error"):
        raise PolicyError(f"on_change is 'recompile' or 'error', not {on_change!r}.")
    made = backend_of("O1" if policy is None else policy, backend, mode=mode, options=options)
    refuse_unmatched(made.policy, model)
    view = make_view(
        model, made.policy, backend, mode=mode, options=options, fullgraph=fullgraph, dynamic=dynamic,
        on_change=on_change, methods=tuple(methods),
    )  # fmt: skip
    if (inputs := as_inputs(args, kwargs)) is not None:
        capture_view(runner_of(view), *inputs, check)
    return view


def emit(
    captures: Captures, policy: Policy, replayed: Plan | None = None, timer: Timer | None = None
) -> ConvertedModule:
    """Compile captured graphs, in place, and return a converted module over the model's own parameters."""
    found = with_own_constants([c if policy.level.rounds else c.unrounded for c in captures.graphs])
    states = [c.state for c in captures.graphs]
    if replayed is not None and len(found) != max(len(replayed.states), 1):
        raise PlanError(
            f"the plan is for {max(len(replayed.states), 1)} state(s) of a model (train or eval mode, with or without "
            f"gradients), and this model has {len(found)}: {'; '.join(map(str, states))}. {REMEDY}"
        )
    model, named = found[0].model, {name: value for c in found for name, value in c.constants.items()}
    root = skeleton(model, {path: m for c in found for path, m in c.opaque.items()}, named)
    notes = [f"not captured for {state}: {why.splitlines()[0]}" for state, why in captures.missing]
    plans = []
    for at, captured in enumerate(found):
        captured.graph.owning_module = None  # targets are resolved against the new root
        _note_fused(captured, model)
        if policy.level.is_autocasts:
            as_under_autocast(captured.graph, str(policy.device), cast(torch.dtype, policy.dtype))
        plans.append(
            compile_graph(
                captured.graph, policy, functools.partial(attribute_of, root), capture=captured.front_end,
                notes=(*captured.notes, *notes, *kept_notes(replayed)), timer=timer,
                plan=None if replayed is None else replayed.part(at),
                own=None if replayed is None else replayed.own(at),
            )
        )  # fmt: skip
    variants = [Variant(s, c.graph, c.call) for s, c in zip(states, found, strict=True)]
    decided = joined(plans, [str(s) for s in states])
    kept = Kept(
        decided, policy.device or "cpu", type(model).__name__, captures.missing, captures.reads,
        loads_otherwise=loads_otherwise(type(model)),
    )  # fmt: skip
    return ConvertedModule(root, variants, kept, model)


def _note_fused(captured: Captured, model: nn.Module) -> None:
    """Note where eager evaluation runs a fused kernel of attention, in one of the states that a graph holds for."""
    flags, state = captured.state.flags or {}, captured.state
    kinds = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
    note_fused(captured.graph, model, kinds, lambda path: not flags.get(path, False) and state.grad is not True)


def plan(
    model: nn.Module,
    args: Any = None,
    kwargs: Any = None,
    *,
    policy: Policy | str | None = None,
    capture: str = "auto",
    dynamic_shapes: Any = "auto",
) -> Plan:
    """Return the plan that `convert` would carry out, without converting.

    The model is only traced, unless costs are measured.

    Args:
        model: As `convert` takes it.
        args: Example inputs, with the shapes and dtypes of real inputs.
        kwargs: Example keyword inputs.
        policy: As `convert` takes it. With `cost="measured"` ops and steps of the model run on the device, to be timed.
        capture: As `convert` takes it, except "jit".
        dynamic_shapes: As `convert` takes it.

    Raises:
        CaptureError: The model cannot be captured faithfully, or capture is "jit".
        PolicyError: The policy is wrong, or does not fit the model.
        VerificationError: A rewritten graph would not do what its plan says.

    Example:
        >>> fxamp.plan(model, (x,), policy="O2,dtype=bf16,modules.2=fp32").decisions[-1].reason
        'override: modules.2=fp32'
    """
    if capture == "jit":
        raise CaptureError(
            "fxamp.plan decides ahead of time. With capture='jit', call the converted model, then read fxamp.plan_of."
        )
    return to_read(model, args, kwargs, Policy.of(policy), capture, dynamic_shapes).plan


def to_read(
    model: nn.Module, args: Any, kwargs: Any, policy: Policy, capture: str = "auto", dynamic_shapes: Any = "auto",
    replayed: Plan | None = None,
) -> ConvertedModule:  # fmt: skip
    """Convert a model ahead of time only to read the decisions: nothing is checked, and only measured costs run ops."""
    with only_read():
        return _ahead_of_time(model, args, kwargs, policy, capture, dynamic_shapes, replayed, check=False)


def called_to_read(model: nn.Module, args: Any, kwargs: Any, policy: Policy) -> nn.Module:
    """Compile a model and call it once, to read the decisions of its first call; the model is restored afterwards.

    Raises:
        CaptureError: there are no example inputs to call it with.
        PolicyError: the policy is for a device that the model is not on.
    """
    inputs = as_inputs(args, kwargs)
    if inputs is None:
        raise CaptureError("capture='jit' captures at the first call: give example inputs as well.")
    settled, device = resolve(policy, model, inputs), device_of(model, inputs)
    if settled.device != device:
        raise PolicyError(
            f"capture='jit' runs {type(model).__name__}, which is on '{device}': capture ahead of time ('export' or "
            f"'fx') to decide for '{settled.device}'."
        )
    made = _at_first_call(model, policy, None, "auto")
    with untouched(model), preserved(model), only_read():
        made(*pytree.tree_map(fresh, inputs[0]), **pytree.tree_map(fresh, inputs[1]))
    return cast(nn.Module, made)


def plan_of(module: nn.Module) -> Plan:
    """Return the plan of a converted module, or of a compiled one after its first call: one plan for all graphs.

    If submodules were converted one by one, it is still one plan, in which nodes have their paths in the whole model.

    Raises:
        CaptureError: The module was not converted, or was compiled and not called yet.
        NotAModuleError: It is not a module.

    Example:
        >>> compiled = fxamp.compile(model, policy="O1,dtype=bf16", backend="eager")
        >>> _ = compiled(x)
        >>> [decision.colour for decision in fxamp.plan_of(compiled).decisions]
        ['bfloat16', 'bfloat16', 'bfloat16']
    """
    if isinstance(module, ConvertedModule):
        return module.plan
    parts = [(f"{path}.", m.plan) for path, m in _module(module).named_modules() if isinstance(m, ConvertedModule)]
    return compiled.together(parts) if parts and not compiled.is_compiled(module) else compiled.plan_of(module)


def graphs(module: nn.Module) -> list[torch.fx.GraphModule]:
    """Return the graphs of a converted module, or of a compiled one after its first call, in order.

    Raises:
        CaptureError: The module was not converted, or was compiled and not called yet.
        NotAModuleError: It is not a module.

    Example:
        >>> graph, = fxamp.graphs(converted)
        >>> sum(node.target is torch.ops.aten.to.dtype for node in graph.graph.nodes)  # casts, that of the output too
        6
    """
    if isinstance(module, ConvertedModule):
        several = len(module.variants) > 1
        return [module.only(at) for at in range(len(module.variants))] if several else [module]
    found = compiled.entries(_module(module))
    runner = compiled.runner_of(module)
    return [e.graph for e in found] if runner is None else [bound(runner, entry) for entry in entries_of(runner)]


def _module(module: Any) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise NotAModuleError(f"a converted module is needed, not {type(module).__name__}.")
    return module


def _refuse_second_time(model: nn.Module) -> None:
    """Raise CaptureError for a model that is compiled already, or of which a part is converted already.

    What is compiled inside a model is captured with it, by torch.compile itself.
    """
    kind = type(model).__name__
    if compiled.runner_of(model) is not None:
        raise CaptureError(
            f"this {kind} is a view of fxamp: use it as it is, or give fxamp.compile the original model."
        )
    if original_of(model) is not None:
        raise CaptureError(
            f"this {kind} is what torch.compile or fxamp.compile returned: use it as it is, or give fxamp.compile the "
            "original model."
        )
    if compiled.is_compiled(model):
        raise CaptureError(
            f"this {kind} is compiled in place, by its compile(): use it as it is, or give fxamp.compile a copy "
            "(copy.deepcopy(model) is not compiled)."
        )
    for path, module in model.named_modules():
        if isinstance(module, ConvertedModule):
            what = f"submodule '{path}' of this {kind} is" if path else "this module is"
            raise CaptureError(
                f"{what} converted already: compile it by torch.compile(model), or give fxamp.compile the original "
                "model."
            )
