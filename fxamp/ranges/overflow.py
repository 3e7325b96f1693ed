"""`fxamp.find_overflow`: the first op that makes inf or NaN of finite values, and what to run in FP32 against it.

One step runs under a dispatch mode that looks at every value that is made, forward and backward. It knows the storages
that hold a value that is not finite, and where each came from, so that the loss or the gradient names its origin: what
is masked with -inf on purpose, or overflows where nobody reads it, is none. An op may also make finite values of an
inf, as `rsqrt` makes 0; a run in which values fit then shows whether anything comes of it.

The cure is found by running the step again. A node whose value does not fit into FP16 runs in FP32 there and then, and
so does each node that reads it, as long as values do not fit: one more step cures most overflows in forward. Where it
does not, and in backward, a run with all nodes in FP32 shows which gradients do not fit, and whether any colouring can
cure it.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from passes._torch import OpOverload, own_schema, pytree
from passes.contract.errors import FxampError, PolicyError, public
from passes.contract.plan import Decision
from passes.contract.policy import Policy, dtype_name
from passes.contract.reasons import Code
from passes.graph.aliases import mutated_operands
from passes.graph.bodies import Body
from passes.graph.notes import is_inserted
from passes.graph.values import LOW_DTYPES
from passes.ops import ops

from .._torch import current_autograd_node, storage_id
from ..capture.graphs import runner_of
from ..convert import converted_in
from ..diagnose.batches import MOST, Batch, Batches
from ..diagnose.step import NO_REGION, Step, diagnostic, step_of, visible_graphs
from ..errors import NoKernelError
from ..observe.emulation import input_name, is_fp32, raised
from ..observe.interpret import Run
from ..observe.snapshot import outside_of_regions
from ..observe.tensors import dense
from ..observe.watch import LOW_NAMES, Part, Place, Ran, Watch, floats_in, gives_view
from ..observe.workload import Loss
from ..results import Result, some

_RUNS, _SHOWN = 6, 8  # of the step, to find a cure; nodes of a cure in the text
_LOSS = -1  # among the results of a run, beside the ids of parameters
_FAR = 32  # roundings to the low dtype: nearer, a loss or gradients may be apart by the rounding of what was cured
_FIXED = ("cast", "as_autocast")  # kinds of decisions that no override changes


@dataclass(frozen=True)
class Operand:
    """What an op was given."""

    dtype: str  # its dtype
    shape: tuple[int, ...]  # its shape
    least: float  # its least value
    largest: float  # its largest value

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} in [{self.least:.3g}, {self.largest:.3g}]"


@public
@dataclass(frozen=True, repr=False)
class Overflow(Result):
    """The op that first made a value that is not finite, and from there the loss or a gradient is not, or is wrong.

    Attributes:
        where: The key of a node in the plan; for code outside of graphs the line or the module; for a value that was
            not finite from the start, the name of the parameter, or "(inputs)".
        kind: "inf" or "NaN".
        backward: It happened in backward.
        op: What was dispatched, such as "addmm"; "" for a value that was not finite from the start.
        dtype: The dtype of its result.
        source: The user's line, as "net.py:12: x = self.fc(x)".
        operands: What the op was given.
        scale: The loss scale.
        fp32: The keys of the nodes to run in FP32, so that all values and gradients are finite; () if no colouring
            cures it.
        policy: The policy with these nodes in FP32, for `fxamp.convert` or `TrainStep.switch`; None without a cure. Of
            a model that nobody converted it is that of a view at O1, in the low dtype that ran.
        largest_scale: The largest loss scale, a power of 2, at which gradients fit as it is; 0 if there is none.
        why: Why nothing cures it; "" where something does.
        what: What is cast, for a cast: the name of a parameter, or the op that made the value; else "".
        notes: What is to be said of the loss.

    Example:
        >>> fxamp.find_overflow(converted, x, y, loss=nn.functional.cross_entropy) is None
        True
    """

    where: str
    kind: str
    backward: bool
    op: str
    dtype: str
    source: str
    operands: tuple[Operand, ...]
    scale: float
    fp32: tuple[str, ...] = ()
    policy: Policy | None = None
    largest_scale: float = 0.0
    why: str = ""
    what: str = ""
    notes: tuple[str, ...] = ()

    def _text(self, style: str) -> str:
        op = f"the cast of {self.what}" if self.what else self.op
        made = f"{op} makes {self.kind} in {self.dtype}" if self.op else f"{self.kind} from the start"
        line = f" ({self.source})" if self.source and self.source.partition(": ")[0] != self.where else ""
        lines = [f"{self.where}{line}: {made}, in {'backward' if self.backward else 'forward'}"]
        lines += [f"  operand {operand}" for operand in self.operands]
        if self.largest_scale and self.largest_scale < self.scale:
            lines.append(f"  a loss scale of at most {self.largest_scale:g} instead of {self.scale:g} cures it")
        if self.fp32:
            lines.append(f"  {len(self.fp32)} nodes in FP32 cure it: {some(self.fp32, _SHOWN)}")
        if self.policy is not None and len(self.fp32) <= _SHOWN:
            finite = "" if self.fp32 else " is finite"
            lines.append(f'  fxamp.convert(model, policy="{self.policy}"){finite}')
        if self.policy is None and not self.largest_scale:
            lines.append(f"  no cure was found: {self.why}")
        lines += [f"  note: {note}" for note in self.notes]
        mark = "- " if style == "pipe" else "  "
        return "\n".join([lines[0], *(f"{mark}{line.strip()}" for line in lines[1:])])

    def _data(self) -> dict[str, Any]:
        policy = None if self.policy is None else str(self.policy)
        return {**asdict(replace(self, policy=None)), "policy": policy, "text": str(self)}

    def __repr__(self) -> str:
        phase = "backward" if self.backward else "forward"
        return f"<fxamp overflow: {self.kind} at {self.where} in {phase}; {len(self.fp32)} nodes in FP32 cure it>"


@diagnostic
def find_overflow(
    model_or_step: Any, inputs: Any = None, target: Any = None, *, kwargs: Mapping[str, Any] | None = None,
    loss: Loss = None, batches: Iterable[Any] | None = None, policies: Policy | str | None = None,
    scale: float | None = None,
) -> Overflow | None:  # fmt: skip
    """Run one step, and return the first op that makes inf or NaN of finite values; None if nothing comes of any.

    It is the first one in the order of execution from which the loss, or else a gradient, is not finite, or is wrong:
    `rsqrt` makes 0 of an inf. Infinities that nothing comes of, such as a mask of -inf, are none. The first batch that
    overflows counts. Everything is as before afterwards.

    Args:
        policies: Convert the model by this policy first; of a module that nobody converted.
        scale: The loss scale; None is that of the TrainStep, else 1.

    Raises:
        PolicyError: The scale is not positive and finite; there is no loss, or there are no inputs; a window of the
            TrainStep is open.
        NoKernelError: An LSTM cannot run in the low dtype on this CPU, by name.
        CaptureError: The model is on the meta device.
        NotAModuleError: It is neither a module nor a TrainStep.

    Example:
        >>> large = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> _ = nn.init.constant_(large[0].weight, 1e3)
        >>> view = fxamp.convert(large, policy="O1,dtype=fp16")
        >>> found = fxamp.find_overflow(view, torch.full((4, 8), 100.0), loss=torch.mean)
        >>> found.where, found.kind, found.fp32
        ('0/linear#0', 'inf', ('0/linear#0', '1/linear#0'))
        >>> view = fxamp.convert(large, policy=found.policy)
        >>> fxamp.find_overflow(view, torch.full((4, 8), 100.0), loss=torch.mean) is None
        True
    """
    step = step_of(model_or_step, inputs, target, kwargs=kwargs, loss=loss, batches=batches).under(policies)
    if step.train_step is not None and step.train_step.position:
        raise PolicyError("a window of this TrainStep is open: call flush() first.")
    scale, low = step.loss_scale(scale), False
    for batch in step.batches:
        watch = _run(step, batch, scale)
        if (found := _overflow(step, batch, scale, watch)) is not None:
            cured = found.why or found.policy is not None or watch.graphs
            return found if cured else _cured_by_a_view(found, step, batch, watch)
        low = low or watch.low is not None or bool(watch.graphs)
    if isinstance(step.batches, Batches) and step.batches.cut:
        warnings.warn(
            f"only the first {MOST} batches were searched: give a list, or an itertools.islice, for more", stacklevel=2
        )
    if not low:
        warnings.warn(f"nothing of the step ran in 16 bits: {NO_REGION}", stacklevel=2)
    return None


def overflow_of(step: Step, batch: Batch, scale: float) -> Overflow | None:
    """Run one batch with a loss scale; return the overflow, None if there is none. Its cure takes more runs."""
    return _overflow(step, batch, scale, _run(step, batch, scale))


def _overflow(step: Step, batch: Batch, scale: float, watch: _Finite) -> Overflow | None:
    first, hidden = watch.culprit(), watch.hidden()
    if hidden is not None and (first is None or (first.place.backward and not first.name)):
        overflow = _hidden(_described(hidden[0], step, scale, watch), hidden[1], step, batch, watch)
        if overflow is not None:
            return overflow
    if first is None:
        return None
    overflow = _described(first, step, scale, watch)
    if first.name:
        return replace(overflow, why="it was not finite before the step")
    if not watch.graphs:
        return overflow
    try:
        return _cured(overflow, step, batch, watch)
    except NoKernelError as error:  # in code outside of the graphs, whose values are FP32 while a cure is looked for
        return replace(overflow, why=str(error))


def _described(origin: _Origin, step: Step, scale: float, watch: _Finite) -> Overflow:
    """Return an overflow that begins at an origin, without its cure."""
    place, decision = origin.place, watch.decision(origin.place)
    line = place.where if place.kind == "outside" else ""
    return Overflow(
        origin.name or watch.where(place), origin.kind, place.backward, origin.op, origin.dtype,
        line if decision is None else decision.source, origin.operands, scale, what=watch.what(place),
        notes=tuple(step.notes),
    )  # fmt: skip


def _hidden(found: Overflow, reader: str, step: Step, batch: Batch, watch: _Finite) -> Overflow | None:
    """Return an overflow of which a reader makes finite values, with its cure; None if nothing comes of it."""
    if not watch.graphs and step.train_step is not None:
        return None
    try:
        view = step if watch.graphs else step.under(Policy("O1", dtype=watch.low))
        healed = _run(view, batch, found.scale, heals=True, compared=True)
    except FxampError:  # it cannot be converted, or has no kernel in FP32
        return None
    if not healed.forced or not watch.is_far(healed):
        return None
    losses = [float(each.results[_LOSS]) for each in (watch, healed)]
    said = (
        f"no loss shows it: {reader} makes finite values of {found.kind}, and the loss is {losses[0]:.4g}, where with "
        f"these nodes in FP32 it is {losses[1]:.4g}"
    )
    return _with_policy(replace(found, notes=(*found.notes, said)), healed)


@dataclass(frozen=True)
class _Origin:
    """Where a value that is not finite came from; with a name, it was so from the start."""

    order: int
    place: Place
    op: str
    kind: str
    dtype: str
    operands: tuple[Operand, ...] = ()
    name: str = ""
    masks: bool = False  # it holds -inf, and else what is finite

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """Of several that are read, the first is to blame: what may be a mask is so only where nothing else is."""
        return self.masks, self.masks and bool(self.name), self.order


_At = tuple[int, str]  # a node: the number of its graph, and its name
_WRITTEN = _Origin(0, Place("own"), "", "inf", "", (), "(a number in the program)")


class _Finite(Watch):
    """Looks at each value that is made, and remembers where those that are not finite came from.

    Each emitted graph runs node by node, whatever compiles it, and so do the bodies inside it.

    Args:
        model: whose modules are named.
        forced: nodes that run in FP32.
        heals: let a node run in FP32 whose value does not fit otherwise.
    """

    def __init__(self, model: nn.Module, forced: Iterable[_At] = (), *, heals: bool = False) -> None:
        super().__init__(model, _run.__code__)
        self.forced, self.heals = dict.fromkeys(forced), heals  # the nodes whose value did not fit are added
        self.peaks: dict[_At, float] = {}  # the largest gradient that each node makes
        self.low: torch.dtype | None = None  # of the first 16-bit value that an op has made
        self._origins: list[_Origin] = []
        self._bad: dict[int, _Origin | None] = {}  # by storage; None: the program wrote an inf
        self._ends: list[Tensor] = []
        self.results: dict[int, Tensor] = {}  # of a run that is compared: gradients by parameter, and the loss
        self._hidden: dict[int, tuple[_Origin, str]] = {}  # overflows of which an op made finite values, and that op
        self._handed: dict[int, tuple[Any, _At]] = {}  # what graphs have returned, and by which node
        self._crossed: dict[_At, _At] = {}  # inputs of graphs that another one has returned

    def start(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Look at values that are there from the start."""
        for name, t in named:
            if t.is_floating_point() and (kind := _kind(held := _range(t))):
                origin = self._origin(Place("own"), "", kind, dtype_name(t.dtype), (), name, _masks(held))
                self._bad[storage_id(t)] = origin

    def ends(self, tensors: Sequence[Tensor]) -> None:
        """Take those of the loss, or of the gradients, that are not finite, unless the loss was taken."""
        self._ends = self._ends or [t for t in tensors if _kind(_range(t))]

    def hidden(self) -> tuple[_Origin, str] | None:
        """Return the first overflow of which an op made finite values, and that op; None if there is none."""
        return min(self._hidden.values(), key=lambda each: each[0].order, default=None)

    def is_far(self, healed: _Finite) -> bool:
        """Say whether the loss, or else the gradients, are elsewhere than in a run in which values fit."""
        low = _FAR * torch.finfo(self.low or torch.float16).eps
        loss, other = (float(watch.results[_LOSS]) for watch in (self, healed))
        if abs(loss - other) > low * abs(other):
            return True
        pairs = [(self.results[at], g) for at, g in healed.results.items() if at in self.results]
        apart = math.hypot(*(float(torch.linalg.vector_norm(a - b)) for a, b in pairs))
        whole = math.hypot(*(float(torch.linalg.vector_norm(b)) for _, b in pairs))
        return math.isfinite(whole) and not apart <= low * whole

    def culprit(self) -> _Origin | None:
        """Return the first origin of the loss, or else of the gradients; None if all are finite."""
        if not self._ends:
            return None
        known = [o for t in self._ends if (o := self._bad.get(storage_id(t))) is not None]
        return min(known or self._origins, key=lambda o: o.rank, default=_WRITTEN)

    @property
    def policy(self) -> Policy:
        """The policy of the graphs that ran."""
        found: Policy = self.graphs[0].known.plan.policy
        return found

    def where(self, place: Place) -> str:
        """Return how a place is called."""
        named = place.where if place.kind == "outside" else ""
        return "(loss)" if place.kind == "own" else named or super().where(place)

    def decision(self, place: Place) -> Decision | None:
        """Return what was decided on the node of a place."""
        if place.kind != "node":
            return None
        ran = self.graphs[place.graph]
        return ran.decisions.get(ran.key(place.where))

    def what(self, place: Place) -> str:
        """Return what the cast at a place casts: the name of a parameter, else the op that made it; "" for no cast."""
        node = self._node((place.graph, place.where)) if place.kind == "node" else None
        if node is None or not is_inserted(node):
            return ""
        while is_inserted(node):
            node = node.all_input_nodes[0]
        if node.op.startswith("call"):
            return ops.name(node)
        inputs = {n: at for at, n in enumerate(node.graph.find_nodes(op="placeholder"))}
        return self.graphs[place.graph].known.names.get(inputs.get(node, -1)) or input_name(node)

    def may_be_fp32(self, at: _At) -> bool:
        """Say whether a node runs low, and an override can keep it in FP32."""
        decision = self.decision(Place("node", at[1], at[0]))
        may_be = decision is not None and decision.colour in LOW_NAMES and decision.kind not in _FIXED
        return may_be and not self.follows(at)

    def blamed(self, at: _At) -> list[_At]:
        """Return the nodes to run in FP32 for a value or gradient that does not fit at a node: it, or what it reads."""
        if self.may_be_fp32(at) and at not in self.forced and not is_inserted(self._node(at)):
            return [at]
        found, waiting, seen = list[_At](), self._operands(at), set[_At]()
        while waiting:
            held = self._crossed.get(one := waiting.pop(), one)
            if held in seen or not self._node(held).op.startswith("call"):
                continue
            seen.add(held)
            if not is_inserted(self._node(held)) and self.may_be_fp32(held) and held not in self.forced:
                found.append(held)
            else:
                waiting += self._operands(held)
        return found

    def _operands(self, at: _At) -> list[_At]:
        return [(at[0], n.name) for n in self._node(at).all_input_nodes]

    def follows(self, at: _At) -> bool:
        """Say whether a node has the dtype of a value that is written in place, its own or one that it is a view of."""
        found, node = self.decision(Place("node", at[1], at[0])), self._node(at)
        return bool(mutated_operands(node)) or (found is not None and found.code == Code.MUTATED.value)

    def reads_low(self, at: _At) -> bool:
        """Say whether a node runs low, or reads a value that is low before casts of fxamp."""
        node = self._node(at)
        read = [m for n in node.all_input_nodes for m in ((n, *n.all_input_nodes) if is_inserted(n) else (n,))]
        return any(map(_is_low, (node, *read)))

    def low_nodes(self) -> list[_At]:
        """Return all nodes that could run in FP32 instead."""
        every = [(at, n) for at, ran in enumerate(self.graphs) for n in ran.graph.graph.nodes]
        named = [(at, n.name) for at, n in every if n.op.startswith("call") and not is_inserted(n)]
        return [at for at in named if self.may_be_fp32(at)]

    def _node(self, at: _At) -> Node:
        return self.graphs[at[0]].emitted[at[1]]

    def _origin(self, *told: Any) -> _Origin:
        made = _Origin(len(self._origins), *told)
        self._origins.append(made)
        return made

    def op(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run an op, and look at what it makes."""
        written = floats_in((args, named)) if _writes(func) else []
        before = {id(t): _range(t) for t in written}
        out = func(*args, **named)
        # Every op of the forward is given a place, for its backward; where that is, is only asked if it matters.
        later = not self.heals and self._place is None and current_autograd_node() is not None
        place = None if later else self._here()
        if gives_view(func):
            return out
        made = [out] if isinstance(out, Tensor) else floats_in(out)
        if "empty" in func.__name__:  # nothing is in it yet
            for t in made:
                self._bad.pop(storage_id(t), None)
            return out
        for t in {id(t): t for t in (*made, *written)}.values() if written else made:
            if not t.is_floating_point() and not t.is_complex():
                continue
            if self.low is None and t.dtype in LOW_DTYPES:
                self.low = t.dtype
            kind = _kind(held := _range(t))
            if kind:
                self._trace(place or self._here(), func, t, held, (args, named), before)
            else:
                self._hides(func, t, (args, named))
                self._passed(place, t, max(-held[0], held[1]))
        return out

    def _hides(self, func: Any, t: Tensor, told: Any) -> None:
        """Note an overflow in 16 bits of which an op of forward makes a finite value."""
        if not self._bad or current_autograd_node() is not None:
            return
        for g in floats_in(told):
            origin = self._bad.get(storage_id(g))
            if origin is not None and origin.dtype in LOW_NAMES and not origin.name and _kind(_range(g)):
                self._hidden.setdefault(origin.order, (origin, _op_name(func)))

    def _passed(self, place: Place | None, t: Tensor, peak: float) -> None:
        """Note a value that is finite."""
        if place is not None and place.backward and place.kind == "node":
            at = (place.graph, place.where)
            self.peaks[at] = max(self.peaks.get(at, 0.0), peak)
        if self._bad and (
            t.layout is not torch.strided or t.numel() * t.element_size() == t.untyped_storage().nbytes()
        ):
            self._bad.pop(storage_id(t), None)

    def _trace(self, place: Place, func: Any, t: Tensor, found: Any, told: Any, before: Mapping[int, Any]) -> None:
        """Note where a value comes from that is not finite: from an operand, from a number, or from this op."""
        kind, given = _kind(found), [(g, before.get(id(g)) or _range(g)) for g in floats_in(told)]
        kinds = [(g, k) for g, held in given if (k := _kind(held))]
        known = [o for g, _ in kinds if (o := self._bad.get(storage_id(g))) is not None]
        written = any(isinstance(v, float) and not math.isfinite(v) for v in pytree.tree_leaves(told))
        if known:
            self._bad[storage_id(t)] = min(known, key=lambda o: o.rank)
        elif (kinds or written) and (kind == "inf" or any(k == "NaN" for _, k in kinds)):
            self._bad[storage_id(t)] = None
        else:
            operands = tuple(Operand(dtype_name(g.dtype), tuple(g.shape), *held) for g, held in given)
            self._bad[storage_id(t)] = self._origin(
                place, _op_name(func), kind, dtype_name(t.dtype), operands, "", _masks(found)
            )

    def run(
        self, parts: Sequence[Part], graph: GraphModule, by: str, run: Any, args: tuple[Any, ...], compile: Any = None
    ) -> Any:
        """Run a graph as it was emitted, even if a compiler has made something else of it."""
        before, at = self._place, self._enter(parts[0].known)
        ran = self.graphs[at].graph.graph
        for n, value in zip(ran.find_nodes(op="placeholder"), args, strict=False):
            if id(value) in self._handed:  # from a graph before a break
                self._crossed[at, n.name] = self._handed[id(value)][1]
        try:
            outputs = self._nodes(at).start(*args)
            for n, value in zip(ran.output_node().all_input_nodes, _distinct(ran, outputs), strict=False):
                self._handed[id(value)] = value, (at, n.name)
            return outputs
        finally:
            self._place = before

    def _enter(self, converted: Any) -> int:
        """Return the number of a graph here; the graphs inside it follow, in the order of the plan."""
        known = next((at for at, ran in enumerate(self.graphs) if ran.graph is converted.emitted), None)
        if known is not None:
            return known
        first, plan = len(self.graphs), converted.plan
        for i, graph in enumerate(_all_graphs(converted.emitted)):
            known = replace(converted, emitted=graph, plan=plan.from_graph(i))
            self.graphs.append(Ran(first + i, known, graph, "", Part(known)))
        return first

    def _nodes(self, number: int) -> Run:
        """Return a run of a graph; a checkpoint is entered, and its body runs there, once."""
        graph = self.graphs[number].graph
        bodies = {n: held[0] for n, held in Body(graph, None).bodies().items() if held[0].first is not None}

        def call(run: Run, n: Node) -> Any:
            if n in bodies:
                inside = next(at for at, ran in enumerate(self.graphs) if ran.graph is bodies[n].module)
                args, _ = run.fetch_args_kwargs_from_env(n)
                return self._nodes(inside).start(*args[bodies[n].first :])
            self._place = Place("node", n.name, number)
            return self.node(run, number, n)

        return Run(graph, call, keeps=self.heals)

    def node(self, nodes: Run, number: int, n: Node) -> Any:
        """Run a node; where values shall fit, in FP32 if its value or an operand does not fit into its low dtype."""
        if not self.heals:
            return nodes.value_of(n)
        operands = [nodes.env[o] for o in n.all_input_nodes]
        if is_inserted(n):
            made = nodes.value_of(n)
            return operands[0] if _overflows(made, operands[0]) else made
        at = (number, n.name)
        in_fp32 = self.follows(at) and any(_is_low(o) and is_fp32(nodes.env[o]) for o in n.all_input_nodes)
        if not in_fp32 and not self.may_be_fp32(at) and not _is_low(n):
            return nodes.value_of(n)
        if not in_fp32 and at not in self.forced:
            read = torch.fx.map_arg((n.args, n.kwargs), lambda o: _planned(o, nodes.env[o]))
            made = nodes.call(n, *read)
            if not self.may_be_fp32(at) or not (_overflows(made, operands) or _overflows(read, operands)):
                return made
            self.forced[at] = None
        # FP32 throughout: its operands as they were before casts of fxamp, and those that are low upcast
        return nodes.call(n, *pytree.tree_map(raised, torch.fx.map_arg((n.args, n.kwargs), nodes.before_casts)))


def _distinct(graph: Graph, outputs: Any) -> list[Any]:
    """Return the values of the nodes that a graph returns, in the order in which its output names them."""
    named: dict[Node, Any] = {}
    leaves = zip(pytree.tree_leaves(graph.output_node().args[0]), pytree.tree_leaves(outputs), strict=True)
    for node, value in leaves:
        if isinstance(node, Node):
            named.setdefault(node, value)
    return [named[n] for n in graph.output_node().all_input_nodes]


def _all_graphs(graph: GraphModule) -> list[GraphModule]:
    """Return a graph and those inside it, each once, in the order in which the compiler decides on them."""
    found, waiting = list[GraphModule](), [graph]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.append(one)
            waiting += reversed([b.module for held in Body(one, None).bodies().values() for b in held])
    return found


def _run(
    step: Step, batch: Batch, scale: float, forced: Iterable[_At] = (), *, heals: bool = False, compared: bool = False
) -> _Finite:
    """Run forward and backward of one batch under a watch, which keeps the results of a run that is `compared`."""
    model = step.model
    watch = _Finite(model, forced, heals=heals)
    inputs = [("(inputs)", t) for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)]
    watch.start((*model.named_parameters(), *model.named_buffers(), *inputs))
    scale /= 1 if step.train_step is None else step.train_step.accumulate_steps
    parts = [part for _, part in converted_in(model)]
    with (
        torch.inference_mode(False), step.as_before(model), visible_graphs(parts), torch.enable_grad(),
        warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.filterwarnings("ignore", "FP16 gradients without a loss scale")  # the scale is known here
        with watch:
            _, loss = step.call(model, batch)
            if loss.requires_grad:
                with outside_of_regions():
                    (loss * scale).backward()
        gradients = {id(p): p.grad for p in model.parameters() if p.grad is not None}
        watch.ends([loss])
        watch.ends([*gradients.values()])
        if compared or watch.hidden() is not None:
            watch.results = {at: dense(t.detach()).clone() for at, t in ({_LOSS: loss} | gradients).items()}
    return watch


def _cured(found: Overflow, step: Step, batch: Batch, seen: _Finite) -> Overflow:
    """Return an overflow with the nodes that have to run in FP32, and with the loss scale that fits."""
    run = functools.partial(_run, step, batch, heals=True)
    watch = seen if found.backward else run(found.scale)
    if watch.culprit() is None:
        return _with_policy(found, watch)
    whole = run(found.scale, seen.low_nodes())
    most = float(torch.finfo(seen.policy.dtype or torch.float16).max)
    large = {at: peak for at, peak in whole.peaks.items() if peak > most and whole.reads_low(at)}
    cast = [max(-o.least, o.largest) for o in found.operands if found.op == "_to_copy"]
    peak = max((*large.values(), *cast), default=0.0)
    if found.backward and most < peak < math.inf:
        fits = 2.0 ** math.floor(math.log2(most * found.scale / peak))
        found = replace(found, largest_scale=fits if _run(step, batch, fits).culprit() is None else 0.0)
    if whole.culprit() is not None:
        return replace(found, why=_why_not(found, step, batch, whole))
    for _ in range(_RUNS):
        origin = watch.culprit()
        if origin is None:
            return _with_policy(found, watch)
        here = [(origin.place.graph, origin.place.where)] if origin.place.kind == "node" else []
        more = [at for at in large if origin.place.backward and watch.may_be_fp32(at) and at not in watch.forced]
        more = more or [at for one in here for at in watch.blamed(one)]
        if not more:
            break
        watch = run(found.scale, [*watch.forced, *more])
    return replace(found, why="with all nodes in FP32 it is finite, and no fewer were found that are enough")


def _cured_by_a_view(found: Overflow, step: Step, batch: Batch, watch: _Finite) -> Overflow:
    """Return an overflow of a model that nobody converted with what cures it in a view at O1."""
    if step.train_step is not None:
        return replace(found, why="the model of the TrainStep is not converted")
    if watch.low is None:
        return replace(found, why="it ran in FP32, and no precision is higher here")
    policy = Policy("O1", dtype=watch.low)
    try:
        view = step.under(policy)
        cure = overflow_of(view, batch, found.scale)
    except FxampError as error:
        return replace(found, why=f"the model cannot be converted: {error}")
    if cure is None:
        return replace(found, policy=policy)
    return replace(found, fp32=cure.fp32, policy=cure.policy, largest_scale=cure.largest_scale, why=cure.why)


def _why_not(found: Overflow, step: Step, batch: Batch, whole: _Finite) -> str:
    """Return why a run with all nodes in FP32 is not finite either."""
    runner = runner_of(step.model)
    plain = None if runner is None else _run(step.of(runner.model), batch, found.scale).culprit()
    if plain is not None:
        return f"the model itself is not finite in FP32, first at {plain.name or plain.place.where or plain.op}"
    last = whole.culprit()
    if last is not None and last.place.kind != "node":
        return f"it runs outside of all graphs, at {last.place.where or whole.where(last.place)}"
    return "what is not finite has no colour of its own: it is written in place, or inside an op with a body"


def _with_policy(found: Overflow, watch: _Finite) -> Overflow:
    fp32 = tuple(dict.fromkeys(watch.graphs[at].key(name) for at, name in watch.forced))
    ops = tuple({**dict(watch.policy.ops), **dict.fromkeys(fp32, "fp32")}.items())
    return replace(found, fp32=fp32, policy=replace(watch.policy, ops=ops))


def _range(t: Tensor) -> tuple[float, float]:
    """Return the least and the largest value of a tensor, NaN if it holds one; (0, 0) if it holds none."""
    if t.layout is not torch.strided:
        t = t.coalesce().values() if t.layout is torch.sparse_coo else dense(t)
    t = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
    if not t.numel() or t.is_meta or t.element_size() < 2:
        return 0.0, 0.0
    least, largest = torch.stack(torch.aminmax(t)).tolist()  # both are read from the device at once
    return least, largest


def _kind(held: tuple[float, float]) -> str:
    """Return "inf" or "NaN" for a range that is not finite, else ""."""
    if math.isnan(held[0]) or math.isnan(held[1]):
        return "NaN"
    return "" if math.isfinite(held[0]) and math.isfinite(held[1]) else "inf"


def _masks(held: tuple[float, float]) -> bool:
    """Say whether a range is that of a mask of -inf."""
    return held[0] == -math.inf and held[1] < math.inf


def _overflows(made: Any, given: Any) -> bool:
    """Say whether a value is not finite, while all that it was made of is."""
    return any(_kind(_range(t)) for t in floats_in(made)) and not any(_kind(_range(t)) for t in floats_in(given))


def _planned(n: Node, value: Any) -> Any:
    """Return the value of a node in the low dtype that is planned for it, if it was kept in FP32."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or not _is_low(n):
        return value
    return value.to(n.meta["val"].dtype)


def _is_low(n: Node) -> bool:
    """Say whether the planned value of a node is one low tensor."""
    planned = n.meta.get("val", n.meta.get("example_value"))
    return isinstance(planned, Tensor) and planned.dtype in LOW_DTYPES


def _op_name(func: Any) -> str:
    return func.overloadpacket.__name__ if isinstance(func, OpOverload) else str(func)


@functools.cache
def _writes(func: Any) -> bool:
    return isinstance(func, OpOverload) and own_schema(func).is_mutable
