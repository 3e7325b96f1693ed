"""A model in, its converted view out; a graph in, a graph out."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from passes.contract.errors import CaptureError, PlanError, PolicyError
from passes.contract.plan import Plan
from passes.contract.policy import Policy

from ._torch import original_of
from .calibration import Calibration
from .capture.backend import Inner, refuse_unmatched, require_inner, split
from .capture.emitted import record_on
from .capture.graph import Graph
from .capture.graphs import graphs_of as graphs_in_place
from .capture.graphs import is_compiled, together
from .capture.graphs import plan_of as plan_in_place
from .capture.inputs import Inputs, as_inputs, resolve
from .capture.parameters import only_read
from .capture.user_graph import convert_graph, store_low
from .errors import NotAModuleError, names_arguments
from .measure.fastest import fastest_plan, measured_costs
from .observe.places import wiring
from .view.capture import capture as capture_view
from .view.capture import capture_states
from .view.graphs import graphs_of
from .view.graphs import plan_of as plan_of_view
from .view.view import is_view, make_view, runner_of

logger = logging.getLogger(__name__)

_VIEW = {  # the arguments that are for a module alone, and their defaults
    "backend": "eager", "mode": None, "options": None, "fullgraph": False, "dynamic": None, "on_change": "recompile",
    "methods": (),
}  # fmt: skip


_MEANT = {
    "dtype": 'policy="O1,dtype=bf16"', "level": 'policy="O1"', "opt_level": 'policy="O1"', "precision": 'policy="O1"',
    "device": 'policy="O1,device=cuda"', "loss_scale": "fxamp.LossScaler", "example_inputs": "args=",
}  # fmt: skip


@names_arguments("convert", _MEANT)
def convert(
    model: nn.Module | ExportedProgram,
    args: Any = None,
    kwargs: Any = None,
    *,
    policy: Policy | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    backend: Inner = "eager",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    check: bool | str = True,
    on_change: str = "recompile",
    methods: Sequence[str] = (),
    calibration: Calibration | str | os.PathLike[str] | None = None,
    weights: str = "fp32",
    capture: str | None = None,
    dynamic_shapes: Any = "auto",
) -> Any:
    """Convert a model to mixed precision.

    A module gives a *view*: an object of a subclass of the model's class over the model's own `__dict__`. Parameters,
    buffers, submodules, hooks and attributes are shared with the model; only calling it differs. It runs the graphs
    that TorchDynamo captures of the model. What Python reads meanwhile is guarded; a guard that fails captures again.

    A GraphModule or an ExportedProgram gives a GraphModule: the compiler alone, without Dynamo, and without a check.

    Args:
        model: A module with FP32 parameters (frozen ones may have any dtype), a GraphModule or an ExportedProgram; it
            is not changed. An optimizer that was built before keeps working.
        args: Example inputs, a tuple (a lone tensor is wrapped). With them the present state of a module is captured at
            once, and checked, on copies of the model and of the inputs that share their memory until they are written:
            what forward writes is written there. State in closures, globals and files is not copied. Without them it
            is captured at its first call. A graph needs them if its values have no shapes.
        kwargs: Example keyword inputs.
        policy: A level ("O0" to "O3"), a policy string ("O2,dtype=bf16,modules.fc3=fp32") or a Policy; "O1" by default.
            Device and dtype that it leaves open are settled at the first capture.
        plan: A Plan, or the path of one, to replay; its policy is used, so do not give `policy` too.
        backend: What runs the converted graphs: "eager", "inductor", the name of any other backend of `torch.compile`,
            or a callable.
        mode: For the backend, as `torch.compile` takes it.
        options: For the backend.
        fullgraph: As `torch.compile` takes it.
        dynamic: As `torch.compile` takes it. None marks dimension 0 of every tensor argument that shares its size with
            the first one, so that another batch size captures nothing.
        check: Compare the captured graphs, unconverted, with the model, on copies: outputs and buffers bit for bit,
            with True at O0 gradients too. "forward" leaves gradients out, False all of it.
        on_change: What a failing guard does: "recompile", or "error", which raises CaptureError.
        methods: Names of methods that are captured like the call. Other methods run under autocast.
        calibration: What `fxamp.calibrate` measured, or the path of it. What came within a factor of 8 of FP16's
            largest number runs in FP32; in BF16 nothing changes, since it has the range of FP32.
        weights: "low" stores the parameters of a graph low that are read low only; for inference.
        capture: Accepted until 1.0, without effect.
        dynamic_shapes: Accepted until 1.0; None is `dynamic=False`.

    Returns:
        The view, or the converted graph, whose parameters are the model's own. Outputs have the shapes and dtypes of
        the model's outputs.

    Raises:
        NotAModuleError: `model` is not a module.
        CaptureError: The model is a view, is wrapped in DataParallel, or is converted or compiled already; its captured
            graph does not compute what the model computes; or a graph has no shapes, and there are no inputs.
        PolicyError: The policy is wrong or does not fit the model; there is no such backend; or an argument is not for
            this kind of model.
        PlanError: The plan cannot be read, or does not fit the model; or the calibration is of other parameters.
        VerificationError: A rewritten graph does not do what its plan says.

    Example:
        >>> converted = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
        >>> converted(x).shape, converted(x).dtype
        (torch.Size([3, 4]), torch.float32)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     bool((converted(x) == model(x)).all())
        True
    """
    asked, replayed = _asked(policy, plan)
    if capture is not None or dynamic_shapes != "auto":
        logger.info("fxamp: capture= and dynamic_shapes= are accepted until 1.0; Dynamo captures every module")
        dynamic = False if dynamic_shapes is None else dynamic
    given = {
        "backend": backend, "mode": mode, "options": options, "fullgraph": fullgraph, "dynamic": dynamic,
        "on_change": on_change, "methods": methods,
    }  # fmt: skip
    inputs = as_inputs(args, kwargs)
    found = None if calibration is None else _calibration(model, replayed, calibration)
    if found is not None:
        asked = _calibrated(model, inputs, asked, found)
    if isinstance(model, (GraphModule, ExportedProgram)):
        return _graph(model, inputs, asked, replayed, weights, given)
    if weights != "fp32":
        raise PolicyError(
            "weights='low' is for graphs: export the model, convert the ExportedProgram, and save that. To cast the "
            "weights of a view once for inference, use fxamp.frozen(view)."
        )
    view = _view(model, inputs, asked, replayed, check, given)
    if found is not None and inputs is None:
        runner_of(view).graphs.ensure = functools.partial(_refuse_edited, found)
    return view


def compile(model: nn.Module, args: Any = None, kwargs: Any = None, *, backend: Inner = "inductor", **more: Any) -> Any:
    """Convert a model, and compile its graphs: `convert` with `backend="inductor"`, and the same arguments otherwise.

    Raises:
        FxampError: As `convert`.

    Example:
        >>> compiled = fxamp.compile(model, policy="O2,dtype=bf16", backend="eager")  # "inductor" by default
        >>> compiled(x).shape, compiled(x).dtype
        (torch.Size([3, 4]), torch.float32)
    """
    return convert(model, args, kwargs, backend=backend, **more)


def _asked(policy: Policy | str | None, plan: Plan | str | os.PathLike[str] | None) -> tuple[Policy, Plan | None]:
    """Return the policy, and the plan to replay."""
    if plan is None:
        return Policy.of(policy), None
    if policy is not None:
        raise PolicyError("a plan has its own policy: give convert a plan or a policy, not both.")
    read = plan if isinstance(plan, Plan) else Plan.load(_path(plan, "plan"))
    return read.policy, read


def _path(value: Any, what: str) -> str | os.PathLike[str]:
    """Return what a plan or a calibration is read from."""
    if isinstance(value, (str, os.PathLike)):
        return value
    raise PlanError(f"{what}= is a {what}, or the path of one that was saved, not {type(value).__name__}.")


def _calibration(model: Any, replayed: Plan | None, calibration: Calibration | str | os.PathLike[str]) -> Calibration:
    """Return a calibration of the parameters that a model has."""
    if replayed is not None:
        raise PolicyError("a plan says what runs in FP32 already: give convert a plan or a calibration, not both.")
    found = calibration if isinstance(calibration, Calibration) else Calibration.load(_path(calibration, "calibration"))
    if isinstance(model, nn.Module):
        found.refuse_stale(model)
    return found


def _calibrated(model: Any, inputs: Inputs | None, policy: Policy, found: Calibration) -> Policy:
    """Return a policy that runs in FP32 what is too large for FP16, of the code that was calibrated."""
    settled = resolve(policy, model.module() if isinstance(model, ExportedProgram) else model, inputs)
    if inputs is None or settled.dtype is not torch.float16 or not settled.level.rounds:
        return found.applied(settled)
    read = to_read(model, *inputs, policy)
    if isinstance(model, (GraphModule, ExportedProgram)):
        found.refuse_edited(wiring(read.graph), whole=True)
    else:
        of_state = [g for g in runner_of(read).graphs if _is_calibrated(g, found)]
        found.refuse_edited({k: v for g in of_state for k, v in wiring(g.emitted.graph).items()}, whole=True)
    return found.applied(settled, plan_of(read))


def _is_calibrated(graph: Graph, found: Calibration) -> bool:
    """Say whether a graph was captured in the state of the model that was calibrated."""
    return (graph.state.training, graph.state.grad) == (found.training, "grad")


def _refuse_edited(found: Calibration, graph: Graph, whole: bool) -> None:
    """Refuse a graph of a view that is captured at its first call, if its code is not that which was calibrated."""
    if _is_calibrated(graph, found) and graph.plan.policy.dtype is torch.float16:
        found.refuse_edited(wiring(graph.emitted.graph), whole=whole)


def _graph(
    model: GraphModule | ExportedProgram, inputs: Inputs | None, policy: Policy, replayed: Plan | None, weights: str,
    given: Mapping[str, Any],
) -> GraphModule:  # fmt: skip
    if isinstance(model, GraphModule) and record_on(model) is not None:
        raise CaptureError(
            f"this graph of {type(model).__name__} is converted already: fxamp.plan_of reads what was decided; convert "
            "the graph that it was made of."
        )
    for name, value in given.items():
        if value != _VIEW[name]:
            kind = type(model).__name__
            raise PolicyError(f"{name}= is for a module; a {kind} is a graph already, and is only converted.")
    if weights not in ("fp32", "low"):
        raise PolicyError(f"weights is 'fp32' or 'low', not {weights!r}.")
    costs = None
    if policy.cost == "measured" and replayed is None:
        costs = measured_costs(policy, model.module() if isinstance(model, ExportedProgram) else model, inputs)
    made = convert_graph(model, inputs, policy, replayed, costs=costs)
    if weights == "low":
        store_low(made)
    return made


def _view(
    model: Any, inputs: Inputs | None, policy: Policy, replayed: Plan | None, check: bool | str,
    settings: Mapping[str, Any],
) -> Any:  # fmt: skip
    _refuse(model)
    require_inner(settings["backend"])
    if ours := split(settings["options"])[0]:
        raise PolicyError(
            f"options go to the inner backend, and {', '.join(map(repr, ours))} are arguments: write "
            "fxamp.compile(model, policy=...)."
        )
    if check not in (True, "forward", False):
        raise PolicyError(f"check is True, 'forward' or False, not {check!r}.")
    refuse_unmatched(policy, model)
    _refuse_untouched_children(model, policy)
    view = make_view(model, policy, **{**settings, "replayed": replayed})
    measured = policy.cost == "measured" and replayed is None
    if measured:
        runner_of(view).graphs.costs = measured_costs(policy, model, inputs)
    if inputs is not None:
        capture_view(runner_of(view), *inputs, check)
    if not measured or inputs is None:
        return view
    best = fastest_plan(view, inputs)
    return _view(model, inputs, best.policy, best, False, settings)


def plan(
    model: nn.Module | ExportedProgram, args: Any = None, kwargs: Any = None, *,
    policy: Policy | str | None = None, dynamic: bool | None = None,
) -> Plan:  # fmt: skip
    """Return the plan that `convert` would carry out, in every state of a model, without converting it.

    The arguments are those of `convert`. A module needs example inputs, with the shapes and dtypes of real ones. It is
    only captured, on a copy, in train and in eval mode, with gradients and without; what lies in front of a graph break
    runs on the copy. The plan is complete if every parameter that a call reads is in a graph. With `cost="measured"`
    ops and steps of it run on the device, to be timed. The device that the plan is for may be absent, and the model on
    the meta device: code that asks for autocast is answered as there, pieces run in FP32, and notes name the lines that
    ask for the kind of device.

    Raises:
        CaptureError: There are no example inputs, or the model cannot be captured.
        PolicyError: The policy is wrong, or does not fit the model.
        VerificationError: A rewritten graph would not do what its plan says.

    Example:
        >>> fxamp.plan(model, (x,), policy="O2,dtype=bf16,modules.2=fp32").decisions[-1].reason
        'override: modules.2=fp32'
    """
    return plan_of(to_read(model, args, kwargs, Policy.of(policy), dynamic=dynamic))


def to_read(
    model: Any, args: Any, kwargs: Any, policy: Policy, *, dynamic: bool | None = None, replayed: Plan | None = None
) -> Any:
    """Convert a model in all of its states, to read what was decided; nothing is checked.

    Raises:
        CaptureError: there are no example inputs, or the model cannot be captured.
    """
    inputs = as_inputs(args, kwargs)
    with only_read():
        if isinstance(model, (GraphModule, ExportedProgram)):
            return _graph(model, inputs, policy, replayed, "fp32", {})
        _refuse(model)
        if inputs is None:
            raise CaptureError(
                f"the plan of a module is decided on what it does with example inputs: give those of "
                f"{type(model).__name__} as args and kwargs."
            )
        view = _view(model, inputs, policy, replayed, False, {**_VIEW, "dynamic": dynamic})
        capture_states(runner_of(view), *inputs)
        return view


def plan_of(module: nn.Module) -> Plan:
    """Return what was decided for a view, a converted graph, or a compiled module: one plan for all graphs.

    If submodules were converted one by one, it is still one plan, in which nodes have their paths in the whole model.

    Raises:
        CaptureError: The module was not converted, or nothing of it was captured yet.
        NotAModuleError: It is not a module.

    Example:
        >>> [decision.colour for decision in fxamp.plan_of(converted).decisions]
        ['bfloat16', 'bfloat16', 'bfloat16']
    """
    parts = converted_in(module)
    if parts and parts[0][0] == "":
        return _plan_of_one(parts[0][1])
    if parts and not is_compiled(module):
        return together([(f"{path}.", _plan_of_one(part)) for path, part in parts])
    return plan_in_place(module)


def _plan_of_one(part: nn.Module) -> Plan:
    if is_view(part):
        return plan_of_view(runner_of(part))
    plan: Plan = record_on(part)["plan"]  # type: ignore[index,arg-type]
    return plan


def converted_in(module: Any) -> list[tuple[str, Any]]:
    """Return the views and converted graphs in a module, outermost alone, by path.

    Raises:
        NotAModuleError: it is not a module.
    """
    if not isinstance(module, nn.Module):
        raise NotAModuleError(f"a converted module is needed, not {type(module).__name__}.")
    found: list[tuple[str, Any]] = []
    for path, part in module.named_modules():
        if any(path.startswith(f"{outer}.") or not outer for outer, _ in found):
            continue
        if is_view(part) or (isinstance(part, GraphModule) and record_on(part) is not None):
            found.append((path, part))
    return found


def graphs(module: nn.Module) -> tuple[GraphModule, ...]:
    """Return the emitted graphs of a view, a converted graph, or a compiled module, in a fixed order.

    The order is that of states: train before eval, with gradients before without, and in a state that of the source.
    Each graph of a view has the model's parameters and buffers by name, inputs named by argument, and in
    `meta["fxamp"]` its state, its plan, and where Dynamo broke it. It is called with the model's tensor inputs. The
    graphs of a model compiled in place are as Dynamo makes them: parameters and buffers are inputs.

    Raises:
        CaptureError: The module was not converted, or nothing of it was captured yet.
        NotAModuleError: It is not a module.

    Example:
        >>> graph, = fxamp.graphs(converted)
        >>> sum(node.target is torch.ops.aten.to.dtype for node in graph.graph.nodes)  # casts, that of the output too
        6
    """
    parts = converted_in(module)
    if not parts:
        return tuple(graph.emitted for graph in graphs_in_place(module))
    made: list[GraphModule] = []
    for _, part in parts:
        made += graphs_of(runner_of(part)) if is_view(part) else (part,)
    if not made:
        plan_of(module)  # says that nothing was captured yet
    return tuple(made)


def _refuse_untouched_children(model: nn.Module, policy: Policy) -> None:
    """Raise CaptureError for a child that is a view at O0, in a model that would hand it values in 16 bits."""
    for path, child in model.named_modules() if policy.level.rounds else ():
        if is_view(child) and not runner_of(child).graphs.asked.level.rounds:
            name, level = type(child).__name__, runner_of(child).graphs.asked.level
            raise CaptureError(
                f"{path!r} of this {type(model).__name__} is a view at {level}, which leaves dtypes as they are, and "
                f"{policy.level} would hand it values in 16 bits: put the {name} itself there, and convert with "
                f"policy='{policy},modules.{path}=fp32'."
            )


def _refuse(model: Any) -> None:
    """Raise for what is not a model, and for one that is converted, compiled, or wrapped already."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}: make an instance" if isinstance(model, type) else type(model).__name__
        way_out = ": make it the forward of a module" if callable(model) and not isinstance(model, type) else ""
        raise NotAModuleError(
            f"fxamp converts a torch.nn.Module, a GraphModule or an ExportedProgram, not {kind}{way_out}."
        )
    kind = type(model).__name__
    if is_view(model):
        raise CaptureError(f"this {kind} is a view of fxamp: use it as it is, or convert the original model.")
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(f"this {kind} is of TorchScript, which cannot be captured: convert the original model.")
    if original_of(model) is not None:
        raise CaptureError(
            f"this {kind} is what torch.compile returned: convert the original model; backend=, mode= and options= of "
            "fxamp.convert say what compiles its graphs."
        )
    if is_compiled(model):
        raise CaptureError(
            f"this {kind} is compiled in place, by its compile(): use it as it is, or convert a copy "
            "(copy.deepcopy(model) is not compiled)."
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.DataParallel):
            raise CaptureError(
                f"module '{path or '(root)'}' (DataParallel) is a parallel wrapper. Convert the module inside it, then "
                "wrap what fxamp.convert returns."
            )
