"""One graph for both training modes: a literal that differs between them follows the owner's `training` flag.

Before: dropout(x, 0.5, True) in train mode, dropout(x, 0.5, False) in eval mode
After:  dropout(x, 0.5, encoder.drop.training)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from passes.errors import CaptureError
from passes.values import module_path, source

_DROPOUTS = (torch.ops.aten.dropout.default, F.dropout)
_FLAGS = ("train", "training", "use_input_stats", "dropout_p")
_PLAIN = (bool, int, float, type(None))


def by_mode(training: bool, train: Any, evaluation: Any) -> Any:
    """Return the literal of the mode the owner is in."""
    return train if training else evaluation


def count_(counter: torch.Tensor, training: bool, values: int = 2) -> torch.Tensor:
    """Add one in training, in place; else write nothing, as adding zero would to autograd and to torch.func.

    Args:
        counter: how many batches there were.
        training: whether this one counts.
        values: how many values each channel has in it.

    Raises:
        ValueError: one value has no variance, and would leave NaN among the running statistics; from
            `torch.nn.functional.batch_norm`, which the exporter looks into without keeping what it checks.
    """
    if training and values == 1:
        raise ValueError("Expected more than 1 value per channel when training: this batch is of size 1")
    return counter.add_(1) if training else counter


def merge(train: Graph, evaluation: Graph, constants: dict[str, Any], others: dict[str, Any]) -> Graph:
    """Make every literal of the train graph that differs in eval follow its owner's flag, in place; return that graph.

    Args:
        train: the graph captured in train mode.
        evaluation: the graph captured in eval mode.
        constants: what the train graph's lifted constants are, by name.
        others: the same of the eval graph.

    Raises:
        CaptureError: the two graphs differ in more than literals; names the first node that does.
    """
    return _Merge(train, evaluation, constants, others).run()


def follows_mode(graph: Graph) -> bool:
    """Say whether a graph captured in one mode has ops that a training flag decides on."""
    return any(
        isinstance(n.target, torch._ops.OpOverload) and any(a.name in _FLAGS for a in n.target._schema.arguments)
        for n in graph.nodes
    )


class _Differ(Exception):  # noqa: N818 - a signal inside this file, not an error
    pass


class _Merge:
    def __init__(self, train: Graph, evaluation: Graph, constants: dict[str, Any], others: dict[str, Any]) -> None:
        self.train = train
        self.evaluation = evaluation
        self.constants = constants
        self.others = others
        self.flags: dict[str, Node] = {}
        self.twin: dict[Node, Node] = {}  # eval node -> train node
        self.only_train: set[Node] = set()  # dropouts that eval mode leaves out

    def run(self) -> Graph:
        pairs = self._align()
        self.twin = {e: t for t, e in pairs}
        for node, other in pairs:
            try:
                mine, theirs = _spelled_out(node, other)
                node.args = self._follow(node, mine[0], theirs[0])
                node.kwargs = self._follow(node, mine[1], theirs[1])
            except _Differ:
                raise _refusal(node, other) from None
        return self.train

    def _align(self) -> list[tuple[Node, Node]]:
        """Pair the nodes of both graphs; batch norm's batch counter and dropouts may stand in the train graph alone."""
        left = [n for n in self.train.nodes if n.op != "get_attr" and not _is_contiguous(n)]
        right = [n for n in self.evaluation.nodes if n.op != "get_attr" and not _is_contiguous(n)]
        pairs, j = [], 0
        for node in left:
            if j < len(right) and _same_call(node, right[j]):
                pairs.append((node, right[j]))
                j += 1
            elif _is_batch_counter(node):
                self._count_in_training(node)
            elif node.target in _DROPOUTS:
                node.args, node.kwargs = _dropout(node, self._flag(module_path(node))), {}
                self.only_train.add(node)
            else:
                raise _refusal(node, right[j] if j < len(right) else None)
        if j < len(right):
            raise _refusal(None, right[j])
        return pairs

    def _count_in_training(self, node: Node) -> None:
        """Put `count_` in the place of batch norm's own `add_`."""
        with self.train.inserting_before(node):
            values = self._values_per_channel(module_path(node))
            counted = self.train.call_function(count_, (node.args[0], self._flag(module_path(node)), *values))
        counted.meta = dict(node.meta)
        node.replace_all_uses_with(counted)
        self.train.erase_node(node)

    def _values_per_channel(self, norm: str) -> list[Node]:
        """Return the number of values that a batch norm averages, where only the size of the batch can tell."""
        norms = self.train.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default)
        x = next((n.args[0] for n in norms if module_path(n) == norm), None)
        if not isinstance(x, Node) or any(size != 1 for size in x.meta["val"].shape[2:]):
            return []
        size = self.train.call_function(torch.ops.aten.sym_size.int, (x, 0))
        size.meta["val"] = x.meta["val"].shape[0]
        return [size]

    def _follow(self, node: Node, a: Any, b: Any) -> Any:
        """Return the train graph's argument `a`, made to become `b` in eval mode."""
        if isinstance(a, Node) and isinstance(b, Node):
            return self._same_value(node, a, b)
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
            return type(a)(self._follow(node, x, y) for x, y in zip(a, b, strict=True))
        if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
            return {k: self._follow(node, a[k], b[k]) for k in a}
        if isinstance(a, slice) and isinstance(b, slice):
            return slice(*(self._follow(node, getattr(a, k), getattr(b, k)) for k in ("start", "stop", "step")))
        if isinstance(a, Node) or isinstance(b, Node):
            raise _Differ
        if type(a) is type(b) and (a is b or a == b or (a != a and b != b)):
            return a
        if not isinstance(a, _PLAIN) or not isinstance(b, _PLAIN):
            raise _Differ
        flag = self._flag(module_path(node))
        if a is True and b is False:
            return flag
        with self.train.inserting_before(node):
            chosen = self.train.call_function(by_mode, (flag, a, b))
        chosen.meta = {**node.meta, "val": a}
        return chosen

    def _same_value(self, node: Node, a: Node, b: Node) -> Node:
        plain, other = self._through(a), self._through(b)
        if plain.op == other.op == "get_attr":
            if not self._same_attribute(plain, other):
                raise _Differ
        elif self.twin.get(other) is not plain:
            raise _Differ
        if not _is_contiguous(b) or _is_contiguous(a):
            return a
        with self.train.inserting_before(node):
            made = self.train.call_function(torch.ops.aten.contiguous.default, (a,))
        made.meta = {**node.meta, "val": a.meta["val"]} if "val" in a.meta else dict(node.meta)
        return made

    def _through(self, node: Node) -> Node:
        while _is_contiguous(node) or node in self.only_train:
            node = node.args[0]  # type: ignore[assignment]
        return node

    def _same_attribute(self, a: Node, b: Node) -> bool:
        name = str(a.target).removeprefix("_fxamp.")
        if a.target != b.target or name == a.target:
            return a.target == b.target
        return _same_constant(self.constants.get(name), self.others.get(name))

    def _flag(self, owner: str) -> Node:
        if owner not in self.flags:
            with self.train.inserting_before(next(iter(self.train.nodes))):
                node = self.train.create_node("get_attr", f"{owner}.training".lstrip("."))
            node.meta["val"] = True
            self.flags[owner] = node
        return self.flags[owner]


def _same_call(a: Node, b: Node) -> bool:
    return a.op == b.op and (a.target == b.target or a.op in ("output", "placeholder"))


def _same_constant(a: Any, b: Any) -> bool:
    if isinstance(a, GraphModule) and isinstance(b, GraphModule):
        held = (
            dict(a.named_buffers()) | dict(a.named_parameters()),
            dict(b.named_buffers()) | dict(b.named_parameters()),
        )
        return (
            a.code == b.code
            and held[0].keys() == held[1].keys()
            and all(_same_constant(v, held[1][k]) for k, v in held[0].items())
        )
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a is b or (a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
    return a is b


def _is_batch_counter(node: Node) -> bool:
    counter = node.args[0] if node.args else None
    return (
        isinstance(counter, Node)
        and counter.op == "get_attr"
        and str(counter.target).endswith("num_batches_tracked")
        and node.target in (torch.ops.aten.add_.Tensor, "add_", operator.iadd)
        and len(node.args) == 2
        and bool(node.args[1] == 1)
    )


def _dropout(node: Node, flag: Node) -> tuple[Any, ...]:
    """Return the arguments of a dropout with its flag put in; a functional one may name them."""
    given = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | dict(node.kwargs)
    rest = (given["inplace"],) if given.get("inplace") else ()
    return given["input"], given.get("p", 0.5), flag, *rest


def _spelled_out(node: Node, other: Node) -> tuple[Any, Any]:
    """Return (args, kwargs) of both; with defaults filled in where one call leaves out what the other gives."""
    pair = [(tuple(n.args), dict(n.kwargs)) for n in (node, other)]
    same = len(pair[0][0]) == len(pair[1][0]) and pair[0][1].keys() == pair[1][1].keys()
    if same or not isinstance(node.target, torch._ops.OpOverload):
        return pair[0], pair[1]
    arguments = node.target._schema.arguments

    def full(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        values = {a.name: given.get(a.name, a.default_value if a.has_default_value() else None) for a in arguments}
        return (
            tuple(values[a.name] for a in arguments if not a.kwarg_only),
            {a.name: values[a.name] for a in arguments if a.kwarg_only},
        )

    return full(*pair[0]), full(*pair[1])


def _is_contiguous(node: Node) -> bool:
    """Recognise what the exporter leaves out where it does nothing, which kernels that depend on the mode decide."""
    return node.target is torch.ops.aten.contiguous.default


def _refusal(node: Node | None, other: Node | None) -> CaptureError:
    def show(n: Node | None) -> str:
        if n is None:
            return "nothing"
        return f"{n.target} in module '{module_path(n)}' ({source(n) or 'no source line'})"

    return CaptureError(
        f"the model computes differently in train and in eval mode: {show(node)} against {show(other)}. One graph "
        "cannot hold both"
    )
