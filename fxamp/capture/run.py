"""What runs one graph, and what is looked at then.

Ambient autocast is off meanwhile, and on again afterwards. The call of a view that is under way hears that the graph
ran; whoever watches sees its nodes; weights that are cast once are read; and the error of an op that refuses the 16
bits that it is given gets a note: its name, its place, and the way out.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import logging
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from passes._torch import FakeTensor, enter_autocast
from passes.contract.plan import Plan
from passes.graph.outputs import viewed
from passes.graph.values import LOW_DTYPES, dtypes_of, module_path, source
from passes.ops import ops
from passes.ops.rules import row_of
from passes.runtime.regions import under_autocast

from .._torch import kept_by_compiled, pop_mode, push_mode, storage_id
from ..observe.watch import Compile, is_run_instead, observed, watching
from .call import Call, count_graph, current
from .graph import Graph
from .graphs import Graphs
from .in_place import compiled_in_place
from .parameters import low_parameters, refuse_low_parameters
from .scope import is_gathered, is_training, scope

logger = logging.getLogger(__name__)

_NO_KERNEL = re.compile(r"not implemented for '(Half|BFloat16|c10::Half|c10::BFloat16)'")


class Captured(BaseException):
    """Raised in the place of running a graph: Dynamo has stored it, and nothing of the model has run."""


class GraphCall:
    """A graph that can be called, as Dynamo calls it.

    The compiler made `run` of `gm`, for `inputs`, and `compile` has it do so once more, with further options. The store
    of its view is `graphs`; for a model that is compiled in place each call finds it. A graph that is `whole` has all
    of a call of the view; `more` gives further inputs, from the inputs of a call.
    """

    __slots__ = (
        "__weakref__", "_by", "_compile", "_crossing", "_device", "_first", "_gm", "_graphs", "_last", "_low", "_model",
        "_more", "_parts", "_regions", "_run", "_seen", "_underflow", "_whole", "graph",
    )  # fmt: skip

    def __init__(
        self, graph: Graph, gm: GraphModule, run: Callable[..., Any], compile: Compile | None,
        inputs: Sequence[Any], device: str, *, graphs: Graphs | None = None, model: Any = None, whole: bool = False,
        more: Callable[[Sequence[Any]], Iterable[Any]] | None = None,
    ) -> None:  # fmt: skip
        self.graph, self._gm, self._run, self._compile = graph, gm, run, compile
        self._by = "eager" if graph.kept is None else graph.kept.by
        self._device, self._graphs, self._model, self._whole, self._more = device, graphs, model, whole, more
        self._first = next(iter(graph.places), -1)
        first = inputs[self._first] if graph.places else None
        twin = (call := current()) is not None and call.on_twin
        self._last = -1 if first is None or twin else id(first)  # torch swaps no tensor with a weak reference
        self._seen = {self._last}
        self._parts = {
            i: v.dtype
            for i, v in enumerate(inputs)
            if isinstance(v, FakeTensor) and v.dtype in LOW_DTYPES and not isinstance(v, nn.Parameter)
        }  # of a part that torch splits off for DDP: what the policy keeps in FP32 arrives so from the part before
        lowered = () if graphs is None else graphs.lowered
        low = (i for i in graph.places if low_parameters([("", inputs[i])]))
        self._low = [i for i in low if graph.inputs[i].path not in lowered]
        self._underflow = UnderflowWatch(graph.plan)
        entered = graph.emitted.graph.find_nodes(op="call_function", target=enter_autocast)
        self._regions = bool(entered) and not graph.plan.policy.level.rounds
        crosses = _read_inputs(graph, inputs), graph.read, tuple(graph.own.items())
        self._crossing = crosses if any(crosses) else None

    def release(self) -> None:
        """Let go of the graph: torch may keep this object for as long as the process lives."""
        for name in ("graph", "_gm", "_run", "_compile", "_graphs", "_model", "_more"):
            setattr(self, name, None)

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        device = self._device
        if not torch.is_autocast_enabled(device):
            return self._called(args)
        torch.set_autocast_enabled(device, False)  # `torch.autocast` takes microseconds more
        try:
            return self._called(args)
        finally:
            torch.set_autocast_enabled(device, True)

    def _called(self, args: tuple[Any, ...]) -> Any:
        if self._first >= 0 and id(args[self._first]) != self._last:
            self._meet(args)
        if self._low and torch.is_grad_enabled():  # Dynamo does not guard the mode of a model that does not read it
            named = [(self.graph.inputs[i].path, args[i]) for i in self._low]
            refuse_low_parameters(named, is_training(), is_gathered)
        if self._parts:
            args = tuple(a.to(self._parts.get(i, a.dtype)) if i in self._parts else a for i, a in enumerate(args))
        count_graph()
        call = current()
        if call is None:
            return self._ran(args)
        call.unlock()
        with _regions_of_its_own(call) if self._regions else _NO_MODES:
            outputs = self._as_captured(args) if call.does == "compare" else self._in_call(call, args)
        if not self._whole or call.does == "compare":
            call.made += (weakref.ref(value) for value in outputs if isinstance(value, Tensor))
        if self._crossing is not None:
            self._note(call, args, outputs)
        return outputs

    def _in_call(self, call: Call, args: tuple[Any, ...]) -> Any:
        """Run what was emitted in a call of a view; raise Captured where the call only captures, and has its graph."""
        call.ran.append(self.graph.number)
        if call.does == "first graph" or (call.does == "capture" and self._whole and call.outer is None):
            raise Captured
        call.whole = self._whole
        elsewhere = call.does == "capture" and self.graph.plan.policy.device != self._device
        run = self._in_fp32 if elsewhere else self._ran
        with _modes_of(call) if call.modes else _NO_MODES:
            outputs = run(args)
        for at in self.graph.written:
            call.forget_casts_of(args[at])
        return outputs

    def _ran(self, args: tuple[Any, ...]) -> Any:
        gm, given = self._gm, args
        if self._more is not None and is_run_instead():
            gm = self.graph.emitted  # what runs instead sees casts of weights, and is not given them
        elif self._more is not None:
            with _NO_MODES if (watch := watching()) is None else watch.of_copies():
                given = *args, *self._more(args)
        try:
            outputs = observed(self.graph, gm, self._by, self._run, given, self._compile)
        except Exception as e:
            name_the_op(e)
            raise
        if not self._underflow.done:
            self._underflow(outputs)
        if self.graph.kept is not None:
            self.graph.kept(args, outputs)
        return outputs

    def _as_captured(self, args: tuple[Any, ...]) -> Any:
        policy, captured = self.graph.plan.policy, self.graph.captured
        if not policy.level.rounds:
            return captured(*args)
        with torch.autocast(self._device, dtype=policy.dtype, cache_enabled=False):
            return captured(*args)

    def _in_fp32(self, args: tuple[Any, ...]) -> Any:
        """Run what was captured in FP32, and cast what comes out as planned, for a kind of device that is absent."""
        wide = [a.float() if isinstance(a, Tensor) and a.dtype in LOW_DTYPES else a for a in args]
        planned: Any = self.graph.emitted.graph.output_node().args[0]
        made = self.graph.captured(*wide)
        dtypes = [dtypes_of(n.meta.get("val")) if isinstance(n, Node) else None for n in planned]
        return tuple(
            value.to(dtype) if isinstance(value, Tensor) and isinstance(dtype, torch.dtype) else value
            for value, dtype in zip(made, dtypes, strict=True)
        )

    def _meet(self, args: tuple[Any, ...]) -> None:
        """Keep the graph for other parameters too, as Dynamo runs it for any module of the same code."""
        first, call = args[self._first], current()
        if call is not None and call.on_twin:
            # On a copy of the view's model, which is only captured, it is kept for the layer that it runs for.
            found = None if self._whole or call.does == "compare" else scope()
            if found is not None and self._graphs is not None and id(first) in found.names:
                call.ran.append(self._graphs.rebind(self.graph.at(args, found.names).of(self._model)).number)
            return
        if id(first) not in self._seen:
            found = scope()
            names = found.names if found is not None else {}
            if self._graphs is None or id(first) in names:  # else as `functional_call` swaps them
                graphs = compiled_in_place(args, found) if self._graphs is None else self._graphs
                kept = graphs.rebind(self.graph.at(args, names))
                self.graph = kept if kept.number == self.graph.number else self.graph
        self._last = id(first)
        self._seen.add(self._last)

    def _note(self, call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Note what crosses a break: low values that something was computed from, and which are the model's own."""
        assert self._crossing is not None
        given, read, own = self._crossing
        for value in (*(inputs[i] for i in given), *(outputs[i] for i in read)):
            if value.dtype in LOW_DTYPES and value.requires_grad:
                call.read[id(value)] = value
        for i, low in own:
            call.own[id(outputs[i])] = outputs[i], low


def _read_inputs(graph: Graph, inputs: Sequence[Any]) -> tuple[int, ...]:
    """Return the places of the inputs with gradients, parameters aside, from which a graph computes something."""
    values = zip(graph.emitted.graph.find_nodes(op="placeholder"), inputs, strict=True)
    return tuple(
        i for i, (node, value) in enumerate(values)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.requires_grad and _is_read(node)
    )  # fmt: skip


def _is_read(value: Node) -> bool:
    """Say whether something is computed from a value; a view of it is no more than that."""
    return any(u.op.startswith("call") and (viewed(u) is None or _is_read(u)) for u in value.users)


@contextlib.contextmanager
def _modes_of(call: Call) -> Iterator[None]:
    modes, call.modes = call.modes, []
    for mode in modes:
        push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            pop_mode()
        call.modes = modes


@contextlib.contextmanager
def _regions_of_its_own(call: Call) -> Iterator[None]:
    """Run a graph that has autocast regions, as at O0: the end of one empties the cache, which a call would keep."""
    calls = [call]
    while (outer := calls[-1].outer) is not None:
        calls.append(outer)
    nested = sum(each.nests for each in calls)
    for _ in range(nested):
        torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(nested):
            torch.autocast_increment_nesting()


_NO_MODES: Any = contextlib.nullcontext()


def name_the_op(error: Exception) -> None:
    """Give the error of a graph a note, if an op that is given 16 bits, and may have no kernel for them, raised it."""
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
    """Measures once what one compiled graph keeps for backward, where a partitioner decides what is recomputed."""

    def __init__(self, by: object) -> None:
        self.by = by if isinstance(by, str) else str(getattr(by, "__name__", type(by).__name__))  # the compiler's name
        self.bytes: int | None = None  # of storages, parameters excluded; None if no call with gradients was seen
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
