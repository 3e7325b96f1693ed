"""Run an emitted graph in FP32, without its casts, and look at every value where the real run rounds.

Before: to(x, bf16): bf16, linear(to, to_1): bf16, softmax(linear): bf16        real kernels
After:  x, linear(x, weight), softmax(linear): all FP32; `at` sees each of them, may change it, and learns its gradient

Kernels need no model of their own, with two exceptions, which round inside (measured on a CPU): log_softmax rounds the
sum of the exponentials and its logarithm, the same for all elements of a row; attention rounds the probabilities, and
in backward the gradient of the scores.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg
from torch.utils.weak import WeakTensorKeyDictionary

from passes._torch import pytree
from passes.graph.aliases import Aliases
from passes.graph.bodies import Body
from passes.graph.notes import READ_OUTPUT, is_inserted, is_ours, note_of
from passes.graph.values import LOW_DTYPES, module_path, no_autocast, source
from passes.ops import ops
from passes.ops.facts import accumulates, facts_of
from passes.ops.rules import row_of
from passes.runtime.casts import again, cast_floating, cast_weight
from passes.runtime.regions import under_autocast

from .._torch import safe_softmax
from .interpret import Run
from .places import OUTPUT, author_keys, node_keys, readers
from .watch import floats_in
from .workload import floats

# How Dynamo names an input of a view: L['args'][0] or L['kwargs']['mask'].
_ARGUMENT = re.compile(r"l_(?:args_(\d+)|kwargs_(\w+))_")

_TO_LOW = ("half", "bfloat16")  # methods
_UNCHANGED = (again, cast_floating, cast_weight)  # casts of the runtime: their first argument is what is cast
Place = tuple[Any, ...]  # where a value is rounded: equal in the graphs of all policies


def input_name(place: Node) -> str:
    """Return what an input of a graph is called in the call: "input 0", or "input mask" by keyword."""
    argument = _ARGUMENT.fullmatch(place.name)
    return f"input {argument[1] or argument[2]}" if argument else place.name


@dataclass(frozen=True)
class Site:
    """A value of an emitted graph, or one inside a kernel."""

    key: str  # of the node in the plan; of the first reader for a cast
    node: Node = field(compare=False)  # in the emitted graph
    # what it is: "" for the result of a node, "cast" for an operand that is cast down, "sum", "log" or
    # "probabilities" inside a kernel, "scores" for what rounds in backward alone, "clamp" for what brings a value
    # into the range of its cast
    part: str = ""
    rounds: bool = True  # the real run rounds it
    writes: bool = False  # it is written in place later on, or was
    # the names in the model of the inputs of its graph
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    # for a cast: the keys of each reader and of what it reads by the cast; an input's key is its name
    reads: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @cached_property
    def place(self) -> Place:
        """Where it is: for a cast, the author's value and all its readers; else the node, its line, and the part."""
        return ("cast", *sorted(self.reads)) if self.reads else (self.key, self.line, self.part)

    @property
    def module(self) -> str:
        """The path of its module."""
        return module_path(self.node)

    @property
    def line(self) -> str:
        """The user's line, "" where it is not known."""
        return source(self.node)

    @property
    def what(self) -> str:
        """The value in words: for a cast, what is cast."""
        if self.part != "cast":
            return f"{self.part} in {ops.name(self.node)}" if self.part else ops.name(self.node)
        first: Any = self.node
        while isinstance(first, Node) and is_ours(first):
            first = first.args[0]
        if first.op.startswith("call"):
            return f"cast of {ops.name(first)}"
        return f"cast of {self.names.get(first.name) or input_name(first)}"


@dataclass(frozen=True)
class Observer:
    """Somebody who looks at values, and may change them; each of these is optional."""

    # is called with every site that makes a floating value, and that value; returns the value to go on with
    value: Callable[[Site, Tensor], Tensor] = lambda _, value: value
    # is called with every read of a floating value: the keys of the reader and of what it reads, and the value;
    # returns the value that is read
    read: Callable[[str, str, Tensor], Tensor] | None = None
    # is called with each read of a low value that has several readers, where there is no `read`; returns the value
    # that is read
    edge: Callable[[Tensor], Tensor] | None = None
    # sums that real kernels make in 16 bits, value after value, are theirs, those of gradients too
    kernels: bool = False
    # is called with what such a kernel makes of a sum in forward, before the value itself is seen
    total: Callable[[Site, Tensor], None] | None = None
    # is called with the key of an op that selects the largest, its operand, how many it selects, and of which
    # dimension (None for all of them)
    choice: Callable[[str, Tensor, int, int | None], None] | None = None


class GraphSites:
    """The sites of one emitted graph; `names` are those of its inputs in the model."""

    def __init__(self, graph: GraphModule, names: Mapping[str, str]) -> None:
        self._names = names
        author = author_keys(graph.graph)
        self._aliases = Aliases(graph.graph)
        self.bodies = Body(graph, None).bodies()
        self.keys = {
            n: author.get(n.args[0], OUTPUT) if key == OUTPUT and n.args and isinstance(n.args[0], Node) else key
            for n, key in node_keys(graph.graph).items()
        }  # of a cast that nothing reads: that of what is cast
        self.low = {n: _is_low(n.meta.get("val")) for n in graph.graph.nodes}
        self._moves = {n: self._only_moves(n) for n in self.keys}
        self._sites: dict[tuple[Node, str], Site] = {}
        self._inside: dict[int, tuple[GraphModule, GraphSites]] = {}

    def inside(self, body: GraphModule) -> GraphSites:
        """Return the sites of a graph inside this one, made once."""
        if id(body) not in self._inside:
            self._inside[id(body)] = body, GraphSites(body, {})
        return self._inside[id(body)][1]

    def _only_moves(self, node: Node) -> bool:
        """Say whether a node makes no number of its own out of low ones."""
        if is_ours(node) and (not is_inserted(node) or note_of(node).made_by == READ_OUTPUT):
            return True
        row = row_of(node)
        read = [o.node for o in ops.operands(node) if floats(o.node.meta.get("val"))]
        return (row.commutes != "" or row.asks != "" or row.is_cast) and all(self.low[n] for n in read)

    def of(self, node: Node, part: str = "") -> Site:
        """Return the site of a node, or of a part of it; found once."""
        found = self._sites.get((node, part))
        if found is None:
            rounds = self.low[node] and not self._moves[node]
            cast = is_inserted(node) and rounds
            reads = tuple((self.keys[r], self.source(node)) for r in readers(node)) if cast else ()
            named = part or ("cast" if cast else "clamp" if is_ours(node) else "")
            writes = self._aliases.is_mutated(node)
            found = Site(self.keys[node], node, named, rounds, writes, self._names, reads)
            self._sites[node, part] = found
        return found

    def sums_low(self, node: Node) -> bool:
        """Say whether the kernel of a low node sums the gradient of what it reads many times in 16 bits."""
        val = node.meta.get("val")
        return isinstance(val, Tensor) and self.low[node] and facts_of(node, val.device.type, val.dtype).sums_low

    def accumulates_low(self, node: Node) -> bool:
        """Say whether a low node adds many values up in 16 bits, one after the other."""
        return self.low[node] and accumulates(node, row_of(node))

    def source(self, node: Node) -> str:
        """Return the key of the author's value behind casts; that of an input is its name."""
        while is_ours(node):
            node = node.args[0]  # type: ignore[assignment]
        return self.keys.get(node, node.name)

    def rounding(self) -> Iterator[Site]:
        """Yield what the real run rounds, without running it: results, casts down, and what lies inside kernels."""
        for node, low in self.low.items():
            if not low or node not in self.keys or row_of(node).asks:
                continue
            _, parts, _ = _INSIDE.get(ops.name(node), (None, "", ""))
            for part in ("", *parts.split()):
                if (site := self.of(node, part)).rounds:
                    yield site
        for node, bodies in self.bodies.items():
            for body in bodies if row_of(node).bodies == "entered" else ():
                yield from self.inside(body.module).rounding()

    def is_written(self, node: Node) -> bool:
        """Say whether a value is written in place."""
        return self._aliases.is_mutated(node)


class Companions:
    """The FP32 values of low tensors that graphs hand out.

    A value crosses a graph break in the dtype of the plan, for which the code behind the break was captured, and is
    read there as it was computed.
    """

    def __init__(self) -> None:
        self._values: Any = WeakTensorKeyDictionary()

    def of(self, values: Any) -> Any:
        """Return values, each low tensor that has a companion replaced by it."""
        return pytree.tree_map_only(Tensor, lambda v: self._values.get(v, v), values)

    def low(self, value: Any, planned: Any) -> Any:
        """Return a value in the dtype of the planned one, and keep it as a companion where that is low."""
        if not is_fp32(value) or not isinstance(planned, Tensor) or planned.dtype not in LOW_DTYPES:
            return value
        made = value.to(planned.dtype)
        self._values[made] = value
        return made


class Emulation(Run):
    """Runs one emitted graph in FP32.

    Args:
        graph: as emitted.
        sites: its sites.
        observer: looks at its values.
        everywhere: look inside the kernels too that run in FP32 by the plan.
        companions: of what crosses graph breaks; None for a graph inside another one.
    """

    def __init__(
        self, graph: GraphModule, sites: GraphSites, observer: Observer, everywhere: bool = False,
        companions: Companions | None = None,
    ) -> None:  # fmt: skip
        super().__init__(graph)
        self._sites, self._observer, self._companions = sites, observer, companions
        self._everywhere = everywhere
        self._learns: set[Node] = set()  # whose values have a gradient without what `at` and `read` make of them

    def run_node(self, n: Node) -> Any:
        """Run one node."""
        if n.op == "output":
            made = {o: self._handed_out(o) for o in n.all_input_nodes}
            return map_arg(n.args[0], lambda o: made[o])
        if not n.op.startswith("call"):
            value = self.value_of(n)
            value = pytree.tree_map(raised, value if self._companions is None else self._companions.of(value))
            if any(isinstance(v, Tensor) and v.requires_grad for v in pytree.tree_leaves(value)):
                self._learns.add(n)
            return value
        if not self._learns.isdisjoint(n.all_input_nodes):
            self._learns.add(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        args, kwargs = pytree.tree_map(raised, (args, kwargs))
        if self._observer.choice is not None and _chooses(n) and is_fp32(args[0]):
            count, dim = self._value(ops.argument(n, "k", 1)), self._value(ops.argument(n, "dim"))
            dim = -1 if dim is None and ops.name(n) == "topk" else dim
            self._observer.choice(self._sites.keys[n], args[0].detach(), count, dim)
        with no_autocast():
            value = pytree.tree_map(raised, self._computed(n, args, kwargs))
        if row_of(n).asks or not floats(n.meta.get("val")):
            return value
        site = self._sites.of(n)
        return pytree.tree_map(lambda v: self._seen(site, v, args), value)

    def _handed_out(self, node: Node) -> Any:
        value = self.env[node] if self._has_gradient(node) else _constant(self.env[node])
        return value if self._companions is None else self._companions.low(value, node.meta.get("val"))

    def _has_gradient(self, node: Node) -> bool:
        return node in self._learns or self._sites.is_written(node)

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        """Return the operands of a node."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        read, edge = self._observer.read, self._observer.edge
        if read is not None and n.op.startswith("call") and not is_ours(n):
            return self._each_read(n, args, kwargs, read)
        if edge is None or not any(self._is_shared(o) for o in n.all_input_nodes):
            return args, kwargs
        shared = {id(self.env[o]) for o in n.all_input_nodes if self._is_shared(o)}
        return pytree.tree_map(lambda v: edge(v) if id(v) in shared else v, (args, kwargs))

    def _each_read(self, n: Node, args: Any, kwargs: Any, read: Callable[[str, str, Tensor], Tensor]) -> Any:
        reader, made = self._sites.keys[n], dict[int, Tensor]()
        if self._sites.is_written(n):
            return args, kwargs
        kept, differentiable = _statistics(n, self._sites.bodies), bool(floats_in(n.meta.get("val")))
        for o in n.all_input_nodes:
            if o in kept:
                continue
            value = self.env[o]
            if is_fp32(value) and id(value) not in made and not self._sites.is_written(o):
                seen = read(reader, self._sites.source(o), value)
                made[id(value)] = seen if differentiable else seen.detach()
        return pytree.tree_map(lambda v: made.get(id(v), v), (args, kwargs))

    def _is_shared(self, node: Node) -> bool:
        value = self.env.get(node)
        several = len(node.users) > 1 and self._sites.low.get(node, False)
        return several and isinstance(value, Tensor) and value.requires_grad and not self._sites.is_written(node)

    def _seen(self, site: Site, value: Any, args: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        given, by_author = any(value is v for v in pytree.tree_leaves(args)), row_of(site.node).is_cast
        rounds = site.rounds and (site.part == "cast" or by_author or self._sites.accumulates_low(site.node))
        if given and not rounds and not (by_author and self._everywhere and torch.is_grad_enabled()):
            return value
        return self._observer.value(site, value.view_as(value) if given and not site.writes else value)

    def _computed(self, n: Node, args: Any, kwargs: Any) -> Any:
        if n.target in _UNCHANGED or (n.op == "call_method" and n.target in _TO_LOW):
            return args[0]
        if n.target is under_autocast:
            return _called(args[0], n.args[2], args[3:], kwargs)
        if any(isinstance(a, GraphModule) for a in pytree.tree_leaves(args)):
            return self._higher_order(n, args)
        kernel, _, arguments = _INSIDE.get(ops.name(n), (None, "", ""))
        if kernel is not None and (self._sites.low[n] or self._everywhere):
            named = {key: self._value(ops.argument(n, key)) for key in arguments.split()}
            made = kernel(lambda part, v: self._observer.value(self._sites.of(n, part), v), named)
            if made is not None:
                return made
        if self._observer.kernels and self._sites.sums_low(n) and (call := self._planned_call(n, args, kwargs)):
            return _SumsOfKernel.apply(*call)  # type: ignore[no-untyped-call]
        if (self._observer.kernels or self._observer.total) and self._sites.accumulates_low(n):
            return self._summed(n, args, kwargs)
        return getattr(self, n.op)(n.target, args, kwargs)

    def _summed(self, n: Node, args: Any, kwargs: Any) -> Any:
        """Add values up in FP32; show what the kernel makes of the sum, or return that."""
        call, total = self._planned_call(n, args, kwargs), None
        if call is not None:
            run, dtypes, *values = call
            with torch.no_grad():  # on copies, which it may write
                total = run(*(v.to(dtype, copy=True) for v, dtype in zip(values, dtypes, strict=True))).float()
        value = getattr(self, n.op)(n.target, args, kwargs)
        if total is not None and self._observer.total is not None:
            self._observer.total(self._sites.of(n), total)
        if total is None or not self._observer.kernels:
            return value
        apart = total - value.detach()
        return value.add_(apart) if self._sites.is_written(n) else value + apart

    def _planned_call(self, n: Node, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """Return a call as a function of its FP32 operands, their planned dtypes, and they; None if it has no such."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        planned = pytree.tree_leaves(map_arg((n.args, n.kwargs), lambda o: o.meta.get("val")))
        at = [i for i, v in enumerate(leaves) if is_fp32(v)]
        if len(planned) != len(leaves) or not at or not all(isinstance(planned[i], Tensor) for i in at):
            return None

        def call(*values: Tensor) -> Any:
            by_place = dict(zip(at, values, strict=True))
            given = pytree.tree_unflatten([by_place.get(i, v) for i, v in enumerate(leaves)], spec)
            return getattr(self, n.op)(n.target, *given)

        return call, tuple(planned[i].dtype for i in at), *(leaves[i] for i in at)

    def _higher_order(self, n: Node, args: Any) -> Any:
        """Run a body that is called once in FP32 too; what else has bodies runs as it is, in the dtypes of its plan."""
        if row_of(n).bodies == "entered":
            inside = Emulation(args[0], self._sites.inside(args[0]), self._observer, self._everywhere)
            return inside.run(*args[row_of(n).operands_at :])

        def planned(operand: Node) -> Any:
            value, val = self.env[operand], operand.meta.get("val")
            return value.to(val.dtype) if is_fp32(value) and isinstance(val, Tensor) else value

        return getattr(self, n.op)(n.target, map_arg(n.args, planned), map_arg(n.kwargs, planned))

    def _value(self, argument: Any) -> Any:
        return raised(self.env[argument] if isinstance(argument, Node) else argument)


class _SumsOfKernel(torch.autograd.Function):
    """A call in FP32, whose gradients by what is smaller than its result are those of a call in the planned dtypes."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., Any], dtypes: tuple[torch.dtype, ...], *values: Tensor) -> Any:
        """Make the call."""
        ctx.call, ctx.dtypes = call, dtypes
        ctx.save_for_backward(*values)
        return call(*values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Make the call again, in FP32 and in the planned dtypes."""
        values, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
        wanted = [i for i, needed in enumerate(needs) if needed]
        found: list[Tensor | None] = [None] * len(values)
        for wide in (True, False):
            of = [i for i in wanted if (values[i].numel() < grad.numel()) is not wide]
            if not of:
                continue
            dtypes = [torch.float32] * len(values) if wide else ctx.dtypes
            given = [v.detach().to(d).requires_grad_() for v, d in zip(values, dtypes, strict=True)]
            with torch.enable_grad():
                made = ctx.call(*given)
            for i, g in zip(of, torch.autograd.grad(made, [given[i] for i in of], grad.to(made.dtype)), strict=True):
                found[i] = g.float()
        return None, None, *found


def _statistics(node: Node, bodies: Mapping[Node, list[Body]]) -> set[Node]:
    """Return the operands in which an op keeps statistics, itself or in a body: they have no gradient."""
    updated = row_of(node).writes[3:]
    found = {o.node for o in ops.operands(node) if o.name in updated}
    for body in (b for b in bodies.get(node, ()) if b.first is not None):
        within = body.bodies()
        inside = {o for n in body.graph.nodes if n.op.startswith("call") for o in _statistics(n, within)}
        found |= {operand for place, operand in body.operands(node).items() if place in inside}
    return found


def _constant(value: Any) -> Any:
    return pytree.tree_map(lambda v: v.detach() if isinstance(v, Tensor) and v.requires_grad else v, value)


# Kernels that round inside.


def _log_softmax(at: Callable[[str, Tensor], Tensor], given: dict[str, Any]) -> Tensor | None:
    x, dim = given["self"] if given["self"] is not None else given["input"], given["dim"]
    if x is None or dim is None or dim not in (-1, x.dim() - 1) or not x.requires_grad:
        return None
    shifted: Tensor = x - x.detach().amax(-1, keepdim=True)
    return shifted - at("log", at("sum", shifted.exp().sum(-1, keepdim=True)).log())


def _cross_entropy(at: Callable[[str, Tensor], Tensor], given: dict[str, Any]) -> Tensor | None:
    x, target = given["self"] if given["self"] is not None else given["input"], given["target"]
    plain = given["weight"] is None and not given["label_smoothing"] and given["reduction"] in (None, 1, "mean")
    if x is None or not plain or x.dim() != 2 or target.is_floating_point():
        return None
    logs = _log_softmax(at, {"self": x, "dim": -1})
    ignored = -100 if given["ignore_index"] is None else given["ignore_index"]
    if logs is None:
        return None
    out: Tensor = torch.nn.functional.nll_loss(logs, target, ignore_index=ignored)
    return out


def _attention(at: Callable[[str, Tensor], Tensor], given: dict[str, Any]) -> Tensor | None:
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    if given["enable_gqa"]:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scale = given["scale"] or 1 / math.sqrt(query.shape[-1])
    scores = at("scores", query @ key.transpose(-2, -1) * scale)
    if given["is_causal"]:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    dropped = torch.dropout(safe_softmax(scores, -1), given["dropout_p"] or 0.0, True)
    out: Tensor = at("probabilities", dropped) @ value
    return out


_Kernel = Callable[[Callable[[str, Tensor], Tensor], dict[str, Any]], Tensor | None]
# How a kernel computes in steps: a function that names its parts, the parts, and the arguments that it reads.
_INSIDE: dict[str, tuple[_Kernel, str, str]] = {
    "log_softmax": (_log_softmax, "sum log", "self input dim"),
    "cross_entropy_loss": (
        _cross_entropy, "sum log", "self input target weight label_smoothing reduction ignore_index"
    ),
    "scaled_dot_product_attention": (
        _attention, "scores probabilities", "query key value attn_mask dropout_p is_causal scale enable_gqa"
    ),
}  # fmt: skip


def _chooses(node: Node) -> bool:
    """Say whether an op selects the largest: top-k and argmax, and max where its indices are read."""
    if ops.name(node) != "max":
        return ops.name(node) in ("topk", "argmax")
    read = [user for user in node.users if user.target is operator.getitem and user.args[1] == 1 and user.users]
    return bool(read) and ops.argument(node, "dim") is not None


def _is_low(value: Any) -> bool:
    return any(t.dtype in LOW_DTYPES for t in floats(value))


def _called(op: Any, low: Any, args: Any, kwargs: Any) -> Any:
    """Call an op without a rule in FP32; one that takes 16 bits alone in those, with results in FP32."""
    try:
        return op(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, AssertionError):
        args, kwargs = pytree.tree_map(lambda v: v.to(low) if is_fp32(v) else v, (args, kwargs))
        made = op(*args, **kwargs)
        return pytree.tree_map(lambda v: v.float() if isinstance(v, Tensor) and v.dtype == low else v, made)


def is_fp32(value: Any) -> bool:
    """Say whether a value is a tensor in FP32."""
    return isinstance(value, Tensor) and value.dtype == torch.float32


def raised(value: Any) -> Any:
    """Return a low tensor, or a low dtype, as FP32."""
    if isinstance(value, Tensor) and value.dtype in LOW_DTYPES:
        return value.float()
    return torch.float32 if isinstance(value, torch.dtype) and value in LOW_DTYPES else value
