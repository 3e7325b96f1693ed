"""Low copies of parameters, which are made once and read by many calls.

In a function that is compiled for them, the casts of parameters are lifted out of the graph and become its inputs.
A call fetches them from the copies that are open on its view, and casts where none are.

Before: graph(w): to = w.to(bfloat16); linear(x, to)
After:  graph(w, low): linear(x, low)        low = copies.of(w, bfloat16)
"""

from __future__ import annotations

import functools
import logging
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.optim import Optimizer

from passes._torch import SET_GRAD, FakeTensor, pytree
from passes.contract.errors import CaptureError
from passes.graph.aliases import Aliases, mutated_operands
from passes.graph.notes import is_inserted
from passes.graph.outputs import viewed
from passes.ops import ops
from passes.ops.rules import row_of
from passes.runtime.casts import cast_weight

from .._torch import (
    copy_together,
    is_stand_in,
    keeps_graph,
    mark_static_address,
    of_fixed_sizes,
    run_as_soon_as_ready,
)
from ..capture.call import current
from ..capture.graph import attribute_of, copied

logger = logging.getLogger("fxamp")


class _Reader(torch.autograd.Function):
    """A second reader of a low copy before backward: its gradient arrives at the master by itself, in FP32."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, low: Tensor, use: _Use) -> Tensor:
        ctx.dtype, ctx.use = master.dtype, use
        return low.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.use.copy.ends:
            ctx.use.copy.valid = False
        return gradient.to(ctx.dtype), None, None


class _Use:
    """Lives as long as autograd may need what a `_Reader` has read."""

    def __init__(self, copy: _Copy) -> None:
        self.copy = copy
        copy.readers += 1

    def __del__(self) -> None:
        self.copy.readers -= 1


class _Copy:
    """The low copy of one parameter.

    Attributes:
        master: the parameter.
        low: the copy, without a history.
        node: the same memory as a cast of the parameter that autograd has recorded; `low`, if the parameter is frozen.
        valid: nothing has ended it since it was cast.
        ends: a backward ends it.
        taken: a graph has read `node`, and its gradient has not come. A copy of a frozen parameter stays taken.
        readers: how many other reads autograd may still need.
        read: it was read since copies were last cast together.
    """

    __slots__ = (
        "__weakref__", "_like", "_source", "_state", "ends", "low", "master", "node", "read", "readers", "taken",
        "valid",
    )  # fmt: skip

    def __init__(self, master: Tensor, dtype: torch.dtype, forget: Callable[[Any], None], ends: bool) -> None:
        self.master, self.ends, self.taken, self.readers, self.read = weakref.ref(master, forget), ends, False, 0, False
        with torch.inference_mode(False), torch.set_grad_enabled(master.requires_grad):
            self.node = master.to(dtype, copy=True)
        self.low = self.node.detach()
        if master.requires_grad:
            run_as_soon_as_ready(self.node)
            self.node.register_hook(functools.partial(_arrived, weakref.ref(self)))
        for tensor in (self.node, self.low):
            mark_static_address(tensor)
        self._like = _like(master)
        self._source: Tensor | None = None
        self._state: tuple[Any, ...] = ()
        self.filled(master)

    def filled(self, master: Tensor) -> None:
        """Note that the copy holds what the parameter holds now."""
        state = contents_of(master)
        if self._source is None or state[1] != self._state[1]:
            self._source = master.detach()  # no other storage gets its address while this one lives
        self.valid, self._state = True, state

    def is_of(self, master: Tensor) -> bool:
        """Say whether the parameter is, as far as it can be told, what it was when it was cast."""
        return self._state == contents_of(master)

    def fits(self, master: Tensor | None) -> bool:
        """Say whether the parameter can be cast into this memory."""
        return master is not None and self._like == _like(master)


def _arrived(copy: weakref.ref[_Copy], gradient: Tensor) -> None:
    """Note that the gradient of a copy has come, and that of a graph that is not kept no other will."""
    if (found := copy()) is not None:
        found.taken = found.taken and keeps_graph()
        found.valid = found.valid and not found.ends


def contents_of(master: Tensor) -> tuple[Any, ...]:
    """Return what changes when a parameter is written, moved or replaced, as far as it shows."""
    return (None if master.is_inference() else master._version), master.data_ptr(), master.requires_grad


def _like(master: Tensor) -> tuple[Any, ...]:
    return master.shape, master.dtype, master.device, master.stride(), master.requires_grad


Scope = Literal["cast_once", "frozen"]


class Copies:
    """Low copies of parameters: one buffer for a parameter and dtype.

    A copy that is not valid any more is cast again when it is read, together with all others that were read since the
    last time. It is cast into the same memory, unless a backward may still need what that holds.

    Args:
        scope: What ends the validity of a copy. In "cast_once" do a step of the optimizer that has the parameter, an
            edit that shows and, of a parameter of which neither was seen, each backward. When it is "frozen", nothing
            does, and no gradient reaches the parameter.
        name: That of the view, for a line of the log.
        bounded: Whoever opens the copies does so for the calls of one micro-batch, and calls `end` after an update. So
            no backward ends them, and calls without gradients read them too, as those of a checkpoint, and in eval.

    Attributes:
        casts: how many casts were made.
    """

    def __init__(self, scope: Scope, name: str = "", *, bounded: bool = False) -> None:
        self.scope, self.casts, self._bounded = scope, 0, bounded
        self._name, self._said = name, set[str]()
        self._copies: dict[tuple[int, torch.dtype], _Copy] = {}
        self._followed = set[int]()  # the parameters of which an update was seen, by identity
        self._in_eval: nn.Module | None = None  # called last with gradients, and not in train mode

    def serves(self, model: nn.Module) -> bool:
        """Say whether a call of a model reads copies."""
        if self._bounded or self.scope == "frozen":
            return True
        if not torch.is_grad_enabled():
            return False
        self._in_eval = None if model.training else model
        return model.training

    def all_of(self, lifted: Iterable[Lifted], args: Sequence[Any]) -> list[Tensor]:
        """Return the copies that a graph reads, each as `of` returns it; microseconds a weight are some of a step."""
        found, fresh, recording = list[Tensor](), None, torch.is_grad_enabled() and self.scope != "frozen"
        for place, dtype, flagged, grad, _ in lifted:
            master = args[place]
            copy = self._copies.get((id(master), dtype)) if recording and grad and master.requires_grad else None
            if copy is not None and fresh is None and not copy.valid:
                copy.read = True
                fresh = self._cast_together()
            if copy is None or copy.taken or not (copy.valid and ((fresh and copy in fresh) or copy.is_of(master))):
                found.append(self.of(master, dtype, flagged, grad))
            else:
                copy.taken = copy.read = True
                found.append(copy.node)
        return found

    def of(self, master: Tensor, dtype: torch.dtype, flagged: bool = False, grad: bool = True) -> Tensor:
        """Return the copy of a parameter, which is made if there is none that is valid.

        If it is `flagged`, it requires a gradient as the parameter does, also where none are computed.
        """
        grad = grad and torch.is_grad_enabled()
        if self.scope == "cast_once" and not (self._bounded or grad or master.requires_grad):
            return cast(master, dtype, flagged)  # a teacher, which loops write through `.data`
        if self.scope == "frozen" and "grad" not in self._said and grad and master.requires_grad:
            self._said.add("grad")
            warnings.warn(
                "a call inside fxamp.frozen records gradients, and none reaches a weight there: call under "
                "torch.no_grad() for inference, or train outside of the region.", stacklevel=2,
            )  # fmt: skip
        copy = self._copies.get((id(master), dtype))
        if copy is None or not (copy.valid and (self.scope == "frozen" or copy.is_of(master))):
            copy = self._cast(master, dtype, copy)
        copy.read = True
        if not torch.is_grad_enabled():
            return copy.node if flagged and not torch.is_inference_mode_enabled() else copy.low
        if self.scope == "frozen" or not master.requires_grad:
            copy.taken = True
            return copy.low
        if not copy.taken:
            copy.taken = True
            return copy.node
        reader: Tensor = _Reader.apply(master, copy.low, _Use(copy))  # type: ignore[no-untyped-call]
        run_as_soon_as_ready(reader)
        return reader

    def _cast(self, master: Tensor, dtype: torch.dtype, copy: _Copy | None) -> _Copy:
        if copy is not None:
            copy.read = True
            self._cast_together()
            if copy.valid and copy.is_of(master):
                return copy
        key, ours = (id(master), dtype), weakref.ref(self)
        self.casts += 1
        ends = self.scope == "cast_once" and not self._bounded and id(master) not in self._followed
        made = self._copies[key] = _Copy(master, dtype, lambda _: _forget(ours(), key), ends)
        return made

    def _cast_together(self) -> set[_Copy]:
        """Cast again, in place, all that was read since the last time and is not valid any more, and return it."""
        again: list[tuple[_Copy, Any]] = []
        for (number, _), copy in self._copies.items():
            master = copy.master()
            if master is None:
                continue
            written = (copy.valid or copy.ends) and not copy.is_of(master)
            if copy.valid and not written:
                continue
            if written:
                self._followed.add(number)
                copy.ends = False
            elif copy.ends and copy.read and master.requires_grad and master.grad is None:
                self._say_unfollowed()
            if copy.read and not (copy.taken or copy.readers) and copy.fits(master):
                again.append((copy, master))
            copy.read = False
        if again and not torch.is_inference_mode_enabled():
            with torch.no_grad():
                copy_together([copy.low for copy, _ in again], [master for _, master in again])
            for copy, master in again:
                copy.filled(master)
                copy.taken = False
            self.casts += len(again)
            return {copy for copy, _ in again}
        return set()

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """End the copies of the parameters that an optimizer has stepped, as a hook on its step."""
        copies, dtypes = self._copies, {dtype for _, dtype in self._copies}
        for p in (p for g in optimizer.param_groups for p in g["params"] if p.requires_grad or p.grad is not None):
            for dtype in dtypes:
                if (copy := copies.get((id(p), dtype))) is not None:
                    copy.valid = False
                    if copy.ends:
                        copy.ends = False
                        self._followed.add(id(p))
        if (model := self._in_eval) is not None:
            inside = set(map(id, model.parameters()))
            if any(id(p) in inside for g in optimizer.param_groups for p in g["params"]):
                self._say("eval", "keeps no casts of weights, since it trains in eval mode: call train() before")

    def _say_unfollowed(self) -> None:
        self._say(
            "steps", "casts weights again after each backward, since what updates them is no torch.optim.Optimizer, and"
            " writes them where no version shows it",
        )  # fmt: skip

    def _say(self, about: str, text: str) -> None:
        if about not in self._said:
            self._said.add(about)
            logger.warning("fxamp: cast_once: %s %s", self._name, text)

    def end(self) -> None:
        """Say that no copy is valid any more; the memory stays."""
        for copy in self._copies.values():
            copy.valid = copy.taken = False

    def __len__(self) -> int:
        return len(self._copies)


def _forget(copies: Copies | None, key: tuple[int, torch.dtype]) -> None:
    if copies is not None:
        copies._copies.pop(key, None)
        copies._followed.discard(key[0])


class Opened:
    """The copies that are open on a view, the innermost last; it does not keep them alive."""

    def __init__(self) -> None:
        self._open: tuple[weakref.ref[Copies], ...] = ()

    def __call__(self) -> Copies | None:
        """Return the innermost copies, None if there are none."""
        return next((copies for each in reversed(self._open) if (copies := each()) is not None), None)

    def serves(self, model: nn.Module) -> bool:
        """Say whether a call of a model reads copies."""
        copies = self()
        return copies is not None and copies.serves(model)

    def open(self, copies: Copies, view: str) -> None:
        """Let calls read copies, until they are closed.

        Raises:
            CaptureError: the view is frozen; `view` is the name that the error gives to it.
        """
        other = self()
        if other is not None and other.scope == "frozen":
            raise CaptureError(
                f"{view} is frozen, here or by another thread, so no gradient reaches its weights, and edits of them "
                "have no effect: leave fxamp.frozen before."
            )
        self._open += (weakref.ref(copies),)

    def close(self, copies: Copies) -> None:
        """Let no call read copies any more; do nothing where none does."""
        self._open = tuple(each for each in self._open if each() not in (None, copies))


class Lifted(NamedTuple):
    """A cast of a parameter that is an input of the graph: which input the parameter is, and as `Copies.of` has it.

    `grad` says that the graph reads it where gradients are on, and `shared` that other graphs may read it too, as from
    autocast's cache: not what is cast of a view of a parameter, nor where the graph casts a parameter repeatedly, nor
    what a checkpoint reads, whose two runs share no cache with what is around it.
    """

    place: int
    dtype: torch.dtype
    flagged: bool
    grad: bool
    shared: bool


def weight_casts(graph: Graph, kept: Collection[int], *, sums_inside: bool = False) -> Iterator[tuple[Node, Lifted]]:
    """Yield the casts that can be lifted out of a graph, of which `kept` are the parameters by place.

    A cast stays if the graph may have written to the parameter before. If gradients are summed inside the graph's own
    backward, that of an input is added after that: of three or more the sum would have another order, and the cast
    stays too.
    """
    places = [n for n in graph.nodes if n.op == "placeholder"]
    at = {n: i for i, n in enumerate(places) if i in kept}
    casts = [n for n in graph.nodes if n.op == "call_function" and is_inserted(n) and n.args[0] in at]
    known, on = set(casts), _with_gradients(graph)
    counted = on if sums_inside else set()
    aliases = Aliases(graph)
    for node in casts:
        master: Any = node.args[0]
        others = [user for user in master.users if user not in known and user in counted]
        leaves = any(user.op == "output" or node in mutated_operands(user) for user in node.users)
        if not leaves and len(others) < 2 and not aliases.epoch(master, node):
            dtype: Any = node.args[1]
            once = sum(cast.args[:2] == node.args[:2] for cast in casts) == 1
            shared = once and all(viewed(user) is None and not row_of(user).recomputed for user in node.users)
            yield node, Lifted(at[master], dtype, node.target is cast_weight, node in on, shared)


def _with_gradients(graph: Graph) -> set[Node]:
    """Return the nodes of a graph that run with gradients on."""
    found, enabled = set(), True
    for node in graph.nodes:
        if node.target is SET_GRAD:
            enabled = bool(node.args[0])
        elif enabled:
            found.add(node)
    return found


def is_plain(value: object) -> bool:
    """Say whether a value is a parameter that is a tensor by itself, not a class whose calls gather or exchange it.

    Of a program that runs on fake tensors, its parameters are; of a trace, those that stand for others are not.
    """
    if type(value) is nn.Parameter:
        return True
    return isinstance(value, nn.Parameter) and isinstance(value, FakeTensor) and not is_stand_in(value)


def lift(
    gm: GraphModule, inputs: Sequence[Any], *, sums_inside: bool = False
) -> tuple[GraphModule, list[Any], list[Lifted]]:
    """Return a copy of a graph in which casts of parameters are further inputs, its inputs, and what each casts."""
    gm, kept = copied(gm), {i: v for i, v in enumerate(inputs) if is_plain(v)}
    casts_before_checkpoints(gm, kept, sums_inside=sums_inside)
    examples, lifted = list(inputs), list[Lifted]()
    for node, what in list(weight_casts(gm.graph, kept, sums_inside=sums_inside)):
        new = _placeholder(gm.graph, f"low_{what.place}_{len(lifted)}", node)
        lifted.append(what)
        master = inputs[what.place]
        low = master.detach().to(what.dtype).requires_grad_(master.requires_grad)
        examples.append(of_fixed_sizes(low))
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    gm.recompile()
    return gm, examples, lifted


def _placeholder(graph: Graph, name: str, like: Node) -> Node:
    """Add an input behind the others of a graph."""
    *_, last = graph.find_nodes(op="placeholder")
    with graph.inserting_after(last):
        new = graph.placeholder(name)
    new.meta = {k: v for k, v in like.meta.items() if k in ("val", "example_value")}
    return new


def casts_before_checkpoints(gm: GraphModule, kept: Collection[int], *, sums_inside: bool = False) -> None:
    """Have what checkpoints cast of parameters, `kept` by place, be cast before them, in place: once for both runs.

    Before: y = recompute(body, x, w)                            body: linear(x, w.to(bfloat16))
    After:  low = w.to(bfloat16); y = recompute(body, x, low)    body: linear(x, low)
    """
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and row_of(n).recomputed]
    if not calls:
        return
    places, aliases = gm.graph.find_nodes(op="placeholder"), Aliases(gm.graph)
    masters: set[Any] = {n for i, n in enumerate(places) if i in kept}
    for call in calls:
        source: Any = call.args[0]
        operands: Any = call.args[1:]
        body = attribute_of(gm, str(source.target)) if isinstance(source, Node) and len(source.users) == 1 else None
        if not isinstance(body, GraphModule):
            continue
        inside = {
            i for i, v in enumerate(operands)
            if v in masters and not aliases.epoch(v, call) and not (sums_inside and sum(map(_reads, v.users)) > 1)
        }  # fmt: skip
        casts_before_checkpoints(body, inside, sums_inside=sums_inside)
        inputs = body.graph.find_nodes(op="placeholder")
        for cast, what in list(weight_casts(body.graph, inside, sums_inside=sums_inside)):
            with gm.graph.inserting_before(call):
                low = gm.graph.node_copy(cast, {inputs[what.place]: operands[what.place]}.__getitem__)
            of_body = inputs[what.place]
            if list(of_body.users) == [cast]:
                call.update_arg(what.place + 1, low)
                of_body.meta.update((k, cast.meta[k]) for k in ("val", "example_value") if k in cast.meta)
            else:
                of_body = _placeholder(body.graph, f"low_{cast.name}", cast)
                call.args = (*call.args, low)
            cast.replace_all_uses_with(of_body)
            body.graph.erase_node(cast)
        body.recompile()
    gm.recompile()


def _reads(user: Node) -> bool:
    return not is_inserted(user)


def casts_inside(gm: GraphModule, names: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """Yield which parameters, named by place, a graph casts in bodies of its ops, and why these casts stay there."""
    named = {n: names[i] for i, n in enumerate(gm.graph.find_nodes(op="placeholder")) if i in names}
    for call in gm.graph.nodes:
        leaves = pytree.tree_leaves(call.args) if call.op == "call_function" and row_of(call).bodies else []
        bodies = [attribute_of(gm, str(n.target)) for n in leaves if isinstance(n, Node) and n.op == "get_attr"]
        for body in (one for one in bodies if isinstance(one, GraphModule)):
            inputs = body.graph.find_nodes(op="placeholder")
            given = leaves[len(leaves) - len(inputs) :] if inputs else []
            here = {i: named[v] for i, v in enumerate(given) if v in named}
            why = "which has another use for it" if row_of(call).recomputed else "which may run often, or not at all"
            for i, name in here.items():
                if any(is_inserted(user) and user.args[0] is inputs[i] for user in inputs[i].users):
                    yield name, f"is cast inside {ops.name(call).removeprefix('higher_order::')}, {why}"
            yield from casts_inside(body, here)


def lifted_inputs(
    lifted: Sequence[Lifted], opened: Callable[[], Copies | None], args: Sequence[Any], *, whole: bool = False
) -> list[Tensor]:
    """Return the casts that were lifted out of a graph, for the inputs of a call of it; a `whole` one runs alone.

    In one call of a view, whatever graph reads a weight, and however often, reads one cast, as from autocast's cache:
    its gradients are summed there, in 16 bits. A weight that is written meanwhile is cast again.
    """
    copies, call = opened(), current()
    if whole and copies is not None:
        return copies.all_of(lifted, args)
    low = cast if copies is None else copies.of
    known: dict[Any, tuple[Tensor, Any]] = {} if call is None else call.low
    found = list[Tensor]()
    for place, dtype, flagged, grad, shared in lifted:
        master = args[place]
        key, recorded = (id(master), dtype), grad and torch.is_grad_enabled() and master.requires_grad
        made, state = known.get(key, (master, None))
        if not shared or state != contents_of(master) or (recorded and not made.requires_grad):
            made = low(master, dtype, flagged, grad)
            if shared:
                known[key] = made, contents_of(master)
        found.append(made)
    return found


def cast(master: Tensor, dtype: torch.dtype, flagged: bool, grad: bool = True) -> Tensor:
    """Cast a parameter for one read; its gradient arrives at the parameter when it would from autocast's cast there.

    What a graph lifts is cast where the graph begins, and would pass its gradient on behind all that the graph reads.
    """
    low = cast_weight(master, dtype) if flagged else master.to(dtype)
    run_as_soon_as_ready(low)
    return low
