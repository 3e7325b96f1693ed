"""Emitted graphs: how one is called, what is looked at then, what is kept on one, and how one is pickled.

The error of an op that refuses the 16 bits it is given gets a note: its name, its place, and the way out.
"""

from __future__ import annotations

import functools
import gc
import keyword
import linecache
import logging
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.graph_module import reduce_graph_module
from torch.utils.weak import WeakIdKeyDictionary

from passes._torch import FakeTensor
from passes.contract.devices import DEVICES
from passes.contract.plan import Plan
from passes.graph.values import LOW_DTYPES, dtypes_of, module_path, source
from passes.ops import ops
from passes.ops.rules import row_of
from passes.runtime.regions import under_autocast

from .._torch import kept_by_compiled, storage_id
from .compiled import Converted
from .modes import ModesKeptOnError
from .outputs import noted
from .parameters import low_parameters, refuse_low_parameters
from .scope import is_gathered, is_training

logger = logging.getLogger(__name__)

_NO_KERNEL = re.compile(r"not implemented for '(Half|BFloat16|c10::Half|c10::BFloat16)'")
_RECORD = "fxamp"  # where a graph keeps what was decided on it


class Emitted(GraphModule):
    """A converted graph: ambient autocast changes nothing in it, and an error in it leaves no mode switched.

    A graph keeps the mode, train or eval, that it was captured in. Where an op has it as an argument, its record
    holds it, and names that op; then `train` and `eval` warn about another mode.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph."""
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return self(*args, **kwargs)
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        with ModesKeptOnError():
            try:
                return super().__call__(*args, **kwargs)
            except Exception as e:
                name_the_op(e)
                raise

    def train(self, mode: bool = True) -> Emitted:
        """Set the flag of the module; the graph computes what it did."""
        captured, op = self.meta.get(_RECORD, {}).get("mode", (mode, ""))
        if captured is not mode:
            has, asked = ("train" if m else "eval" for m in (captured, mode))
            warnings.warn(
                f"fxamp: this graph was captured in {has} mode and keeps it, {op} for example. For {asked} mode, "
                "export or trace the model in that mode, and convert what comes out.",
                stacklevel=2 if mode else 3,  # `eval` calls this
            )
        super().train(mode)
        return self

    def __reduce__(self) -> Any:
        _, (fields, imports) = super().__reduce__()
        return _unpickled, (fields, imports)

    def __copy__(self) -> Emitted:
        return _again(super().__copy__(), self.__dict__)


def _unpickled(fields: dict[str, Any], imports: str) -> Emitted:
    return _again(reduce_graph_module(fields, imports), fields)


def _again(made: Any, fields: dict[str, Any]) -> Emitted:
    """Return a graph as one of this class, with what is kept on it."""
    emitted = Emitted(made, made.graph, type(made).__name__)
    for name, value in fields.items():
        if not hasattr(emitted, name):
            setattr(emitted, name, value)
    emitted.meta, emitted.training = dict(fields["meta"]), made.training
    return emitted


def is_writable(name: str) -> bool:
    """Say whether torch.fx writes the name of an attribute into the code of a graph so that Python reads that name."""
    return not keyword.iskeyword(name) and not {*name} & {*'"\\\n\r\0'}


def with_record(gm: GraphModule, plan: Plan, **more: Any) -> GraphModule:
    """Keep on an emitted graph what was decided on it."""
    gm.meta[_RECORD] = {"plan": plan, **more}
    calls = (n for n in gm.graph.nodes if n.op == "call_function")
    modes = ((n, ops.argument(n, "training", ops.argument(n, "train"))) for n in calls)  # True for train
    flagged = [(n, mode) for n, mode in modes if isinstance(mode, bool)]
    if flagged:
        node, mode = next((pair for pair in flagged if pair[1]), flagged[0])
        gm.meta[_RECORD]["mode"] = mode, f"{ops.name(node)} of '{module_path(node)}' ({source(node)})"
    return gm


def record_on(gm: GraphModule) -> dict[str, Any] | None:
    """Return what `with_record` kept; None for any other graph."""
    found: dict[str, Any] | None = gm.meta.get(_RECORD)
    return found


def at_call(
    run: Callable[..., Any], converted: Converted, example_inputs: Sequence[Any],
    own: Mapping[int, torch.dtype], reused: Callable[[Converted, Sequence[Any]], None],
) -> Callable[..., Any]:  # fmt: skip
    """Return a function that calls a compiled graph with ambient autocast off.

    It marks the outputs at `own` with their dtypes in the model itself, and calls `reused` where the graph reads other
    parameters than in the calls before: Dynamo captures code once that two modules share.
    """
    device, first = converted.plan.policy.device or "cpu", converted.places[0] if converted.places else -1
    seen = WeakIdKeyDictionary({example_inputs[first]: None} if converted.places else {})
    last = weakref.ref(example_inputs[first]) if converted.places else None  # whether it is seen takes microseconds
    watch = UnderflowWatch(converted.plan)
    told = _told(example_inputs)
    paths = dict(zip(converted.places, (path for _, path in converted.parameters), strict=False))
    low = {i: path for i, path in paths.items() if low_parameters([(path, example_inputs[i])])}

    @functools.wraps(run, updated=())
    def call(*args: Any) -> Any:
        nonlocal last
        if torch.is_autocast_enabled(device):
            torch.set_autocast_enabled(device, False)  # `torch.autocast` takes microseconds more
            try:
                return call(*args)
            finally:
                torch.set_autocast_enabled(device, True)
        if last is not None and args[first] is not last():
            if args[first] not in seen:
                reused(converted, args)
                seen[args[first]] = None
            last = weakref.ref(args[first])
        if low and torch.is_grad_enabled():  # Dynamo does not guard the mode of a model that does not read it
            refuse_low_parameters([(path, args[i]) for i, path in low.items()], is_training(), is_gathered)
        if told:
            args = tuple(a.to(told[i]) if i in told and a.dtype != told[i] else a for i, a in enumerate(args))
        try:
            outputs = run(*args)
        except Exception as e:
            name_the_op(e)
            raise
        if own:
            outputs = noted(outputs, own)
        if not watch.done:
            watch(outputs)
        return outputs

    return call


def name_the_op(error: Exception) -> None:
    """Give the error of a graph a note, if an op that is given 16 bits, and may have no kernel for them, has raised it.

    The error stays the user's: its type and its words. Python 3.10 has no notes; there it is a line in the log.
    """
    node = _raised_by(error.__traceback__)
    if node is None or (row_of(node).known and _NO_KERNEL.search(str(error)) is None):
        return
    given = [dtypes_of(n.meta.get("val", n.meta.get("example_value"))) for n in node.all_input_nodes]
    if node.target is not under_autocast and not any(dtype in LOW_DTYPES for dtype in given):
        return
    name, path, line = ops.name(node), module_path(node), source(node)
    where = f"the op {name}{f' of {path!r}' if path else ''}{f' ({line})' if line else ''}"
    text = f"fxamp: {where} is given 16 bits. If it has no kernel for them, set ops.{name}=fp32 in the policy."
    if text in getattr(error, "__notes__", ()):
        return
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        logger.warning(text)


def _raised_by(trace: TracebackType | None) -> Node | None:
    """Return the node of the innermost graph in a traceback that was running, as the line of its code says."""
    found = None
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if trace.tb_frame.f_code.co_name == "forward" and isinstance(module, GraphModule):
            line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
            name = re.split(r"[ :]", line.strip())[0]
            found = next((node for node in module.graph.nodes if node.name == name), found)
        trace = trace.tb_next
    return found


def _told(example_inputs: Sequence[Any]) -> dict[int, torch.dtype]:
    """Return the low dtypes of the inputs at compile time, for a part of a graph that torch splits for DDP.

    A value that the policy keeps in FP32 nevertheless arrives in FP32 from the previous part.
    """
    values = {i: v for i, v in enumerate(example_inputs) if isinstance(v, FakeTensor) and v.dtype in LOW_DTYPES}
    return {i: v.dtype for i, v in values.items() if not isinstance(v, nn.Parameter)}


class UnderflowWatch:
    """Warns once, when gradients flow back through FP16 and no GradScaler has scaled a loss."""

    def __init__(self, plan: Plan) -> None:
        self.done = plan.policy.dtype is not torch.float16 or not plan.policy.level.rounds

    def __call__(self, outputs: Iterable[object]) -> None:
        """Watch the outputs of one call of a graph."""
        if self.done or torch.compiler.is_compiling():
            return
        for out in outputs:
            if isinstance(out, torch.Tensor) and out.requires_grad and not out.is_leaf:
                out.register_hook(self._check)
                return

    def _check(self, _: torch.Tensor) -> None:
        if self.done:
            return
        self.done = True
        scalers = [o for o in gc.get_objects() if issubclass(type(o), torch.amp.GradScaler)]
        if all(getattr(scaler, "_scale", None) is None for scaler in scalers):  # a disabled one has none
            warnings.warn(
                "FP16 gradients without a loss scale underflow silently: scale the loss with fxamp.LossScaler or "
                "torch.amp.GradScaler, or train with fxamp.TrainStep, which scales it.",
                stacklevel=2,
            )


class Kept:
    """Measures once what one compiled graph keeps for backward, where a partitioner decides what is recomputed.

    Attributes:
        by: the name of the compiler.
        bytes: size of the storages that it kept, parameters excluded; None if no call with gradients was seen.
    """

    def __init__(self, by: object) -> None:
        self.by = by if isinstance(by, str) else str(getattr(by, "__name__", type(by).__name__))
        self.bytes: int | None = None
        self._done = False

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Look at one call."""
        if self._done or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self._done = True
        saved = kept_by_compiled(outputs)
        if saved is not None:
            parameters = {storage_id(value) for value in inputs if isinstance(value, nn.Parameter)}
            sizes = {storage_id(t): t.untyped_storage().nbytes() for t in saved}
            self.bytes = sum(size for storage, size in sizes.items() if storage not in parameters)
