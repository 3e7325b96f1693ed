"""The dtypes that a model's own code reads, found by comparing its captures with and without `torch.autocast`.

    x.to(h.dtype)                 to(x, float32)          to(x, bfloat16)             relative: the argument differs
    x.float()                     to(x, float32)          to(x, float32)              literal
    torch.ones(8, dtype=h.dtype)  ones(8, float32)        ones(8, bfloat16)           relative
    h + torch.finfo(h.dtype).tiny add(h, 1.18e-38)        add(h, 1.0e-31)             a number that was read

No source code is analysed: whatever differs between the two captures depends on autocast, and nothing else does. The
differences are noted on the nodes of the graph without autocast. `passes.legalize.reads` and the colouring apply them:

    cast           of a cast: "relative" or "literal"; "undecided" where it does nothing in either capture
    read           of a cast: the dtype that it has under autocast
    replaced       of any other call: ((path, literal), ...) that it has under autocast
    constant_read  of a get_attr: the constant that stands there under autocast; its dtype is in `read`
    autocast       the dtypes of the value under autocast: the oracle that the rules are checked by
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from passes._torch import pytree
from passes.graph.notes import SETTLE, note, note_of, origin
from passes.graph.values import LOW_DTYPES, Inference, dtypes_of, is_floating, literal_dtype, retyped
from passes.ops import ops

from .compare import Differ, Path, Walk, attribute_of, counts, same_call, show

_HOME = "_fxamp."
Constants = Mapping[str, Any]


def relate(plain: Graph, constants: dict[str, Any], low: Graph, others: Constants, *, oracle: bool) -> str:
    """Note on the nodes of a graph how they differ in the capture under autocast.

    Args:
        plain: captured without autocast; only the meta of its nodes is changed, and only where the two line up.
        constants: its lifted constants, by name; those that differ under autocast are added.
        low: captured under autocast.
        others: its constants.
        oracle: whether it was the autocast of the device that the model is converted for.

    Returns:
        "" where the two line up, else the first place where they do not.
    """
    found = _Related(plain, low, _lifted(constants), _lifted(others))
    try:
        found.compare()
    except Differ:
        return _place(plain, low)
    found.carry_out(constants, oracle)
    return ""


def _lifted(constants: Constants) -> Callable[[str], Any]:
    return lambda target: constants.get(target.removeprefix(_HOME)) if target.startswith(_HOME) else None


class _Related(Walk):
    """A graph and its twin under autocast: first compared to the end, then changed."""

    def __init__(self, left: Graph, right: Graph, held: Callable[[str], Any], other: Callable[[str], Any]) -> None:
        super().__init__(left, right, held, other)
        self.casts: list[tuple[Node, torch.dtype]] = []
        self.replaced: list[tuple[Node, Path, Any]] = []
        self.constants: dict[Node, torch.Tensor] = {}
        self.inside: list[_Related] = []

    def compare(self) -> None:
        """Compare the two, op by op."""
        left, right = ([n for n in g.nodes if counts(n)] for g in (self.left, self.right))
        for a, b in zip(left, right, strict=False):
            if not same_call(a, b):
                raise Differ(a, b)
            for path, _, value in self.literals(a, b):
                if ops.name(a) == "to" and isinstance(value, torch.dtype):
                    self.casts.append((a, value))
                else:
                    self.replaced.append((a, path, value))
            self.pair(a, b)
        if len(left) != len(right):
            raise Differ(next(iter(left[len(right) :]), None), next(iter(right[len(left) :]), None))

    def same_attribute(self, a: Node, b: Node) -> bool:
        """Compare inner graphs as well; note constants that the code made in a dtype that it had read."""
        mine, theirs = self.held(str(a.target)), self.other(str(b.target))
        if isinstance(mine, GraphModule) and isinstance(theirs, GraphModule):
            body = _Related(mine.graph, theirs.graph, *(_attributes(gm) for gm in (mine, theirs)))
            body.compare()
            self.inside.append(body)
            return True
        if super().same_attribute(a, b):
            return True
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor) and mine.shape == theirs.shape:
            self.constants[a] = theirs
            return is_floating(mine.dtype) and is_floating(theirs.dtype)
        return False

    def carry_out(self, constants: dict[str, Any], oracle: bool) -> None:
        """Write the differences that were found into the notes of the nodes."""
        for b, a in self.twin.items():
            made = dtypes_of(b.meta.get("val"))
            if oracle and made is not None:
                note(a, autocast=made)
            if oracle:
                note(a, region=note_of(b).region)  # a region that names no dtype takes that of autocast
            if ops.name(a) == "to" and is_floating(dtypes_of(a.meta.get("val"))):
                _describe_cast(a, b, oracle)
        for node, read in self.casts:
            note(node, cast="relative")
            if oracle:
                note(node, read=read)
        for node, path, value in self.replaced:
            note(node, replaced=(*note_of(node).replaced, (path, value)))
        for node, value in self.constants.items():
            name = str(node.target).removeprefix(_HOME) + "_autocast"
            held = self.held(str(node.target))
            # A number out of low range would become infinity here; colouring handles it better.
            constants[name] = held if _same(held.to(value.dtype), value) else value.to(held.dtype)
            note(node, constant_read=_HOME + name, read=value.dtype)
        for body in self.inside:
            body.carry_out(constants, oracle)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(a.isnan(), b.isnan())


def _attributes(gm: GraphModule) -> Callable[[str], Any]:
    return lambda path: attribute_of(gm, path)


def _describe_cast(node: Node, twin: Node, oracle: bool) -> None:
    """Note the meaning of a cast that has the same argument in both captures."""
    before: Any = twin.args[0]
    named = literal_dtype(twin)
    if named is not None and dtypes_of(before.meta.get("val")) != named:
        note(node, cast="literal")
    elif oracle and note_of(node).cast == "undecided" and named is not None:
        note(node, read=named)


def _place(plain: Graph, low: Graph) -> str:
    """Name the first place where two captures do not line up."""
    left, right = ([n for n in g.nodes if counts(n)] for g in (plain, low))
    mine, theirs = ([str(n.target) if n.op.startswith("call") else n.op for n in side] for side in (left, right))
    for kind, i, i2, j, j2 in SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
        if kind != "equal":
            a, b = (left[i] if i < i2 else None), (right[j] if j < j2 else None)
            return f"{show(a)} without autocast, {show(b)} under it"
    return "the same ops have other operands"


def settle(low: Graph, constants: Constants, returned: list[Any]) -> None:
    """Prepare a graph captured under autocast for the compiler: give its values their dtypes without autocast.

    This is for a model whose code takes another branch where a dtype is low. All its casts count as literal.

    Args:
        low: captured under autocast; changed in place.
        constants: its lifted constants.
        returned: the dtypes that the model returns without autocast; they are restored.
    """
    for graph in _graphs(low, constants):
        infer, held = Inference(), dict[Node, Any]()
        for node in list(graph.nodes):
            if ops.name(node) == "_assert_tensor_metadata":
                graph.erase_node(node)
                continue
            value = node.meta.get("val")
            held[node] = made = dtypes_of(value)
            if not node.op.startswith("call") or value is None:
                continue
            if made is not None:
                note(node, autocast=made)
            _widen(node)
            try:
                held[node] = infer(node, lambda n: held.get(n))  # noqa: B023 - called at once
            except Exception:  # whatever a fake kernel raises: the dtype seen under autocast stays
                held[node] = made
            node.meta["val"] = retyped(value, held[node])
    values: Any = low.output_node().args[0]
    _restore_outputs(low, {v: d for v, d in zip(values, returned, strict=False) if isinstance(v, Node)})


def _widen(node: Node) -> None:
    """Note low dtypes as read under autocast, since they are FP32 without it."""
    low = literal_dtype(node)
    if ops.name(node) == "to":
        note(node, cast="relative" if low in LOW_DTYPES else "literal")
    if low not in LOW_DTYPES:
        return
    if ops.name(node) == "to":
        note(node, read=low)
    else:
        given = (tuple(node.args), dict(node.kwargs))
        paths = [path for path, value in pytree.tree_flatten_with_path(given)[0] if value is low]
        at = [tuple(getattr(k, "idx", getattr(k, "key", None)) for k in path) for path in paths]
        note(node, replaced=tuple((path, low) for path in at))
    node.args, node.kwargs = pytree.tree_map(lambda a: torch.float32 if a is low else a, (node.args, node.kwargs))


def _graphs(graph: Graph, constants: Constants) -> Iterator[Graph]:
    yield graph
    for held in constants.values():
        if isinstance(held, GraphModule):
            yield from (m.graph for m in held.modules() if isinstance(m, GraphModule))


def _restore_outputs(graph: Graph, dtypes: Mapping[Node, Any]) -> None:
    """Cast the results of a graph to the dtypes that the model returns, as user casts."""
    output: Any = graph.output_node()
    made: dict[Node, Node] = {}
    for value, dtype in dtypes.items():
        held = dtypes_of(value.meta.get("val"))
        if isinstance(held, torch.dtype) and held.is_floating_point and is_floating(dtype) and held != dtype:
            with graph.inserting_before(output):
                made[value] = graph.call_function(torch.ops.aten.to.dtype, (value, dtype))
            made[value].meta = origin(value) | {"val": retyped(value.meta["val"], dtype)}
            note(made[value], made_by=SETTLE, cast="literal")
    output.args = torch.fx.map_arg(output.args, lambda n: made.get(n, n))
