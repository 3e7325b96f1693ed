"""One graph for both training modes: a literal that differs between them follows the owner's `training` flag.

Before: dropout(x, 0.5, True) in train mode, dropout(x, 0.5, False) in eval mode
After:  dropout(x, 0.5, encoder.drop.training)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from passes._torch import OpOverload, own_schema
from passes.contract.errors import CaptureError
from passes.graph.notes import note, note_of, origin
from passes.graph.values import module_path
from passes.runtime.modes import by_mode, count_

from .compare import Differ, Path, Walk, counts, same_call, spelled_out

_DROPOUTS = (torch.ops.aten.dropout.default, F.dropout)
_FLAGS = ("train", "training", "use_input_stats", "dropout_p")
_PLAIN = (bool, int, float, type(None))


def merge(train: Graph, evaluation: Graph, constants: Mapping[str, Any], others: Mapping[str, Any]) -> Graph:
    """Make every literal of the train graph that differs in eval follow its owner's flag, in place; return that graph.

    Args:
        train: the graph captured in train mode.
        evaluation: the graph captured in eval mode.
        constants: the lifted constants of the train graph, by name.
        others: the same of the eval graph.

    Raises:
        CaptureError: the two graphs differ in more than literals; names the first node that does.
    """
    try:
        return _Merge(train, evaluation, _lifted(constants), _lifted(others)).run()
    except Differ as e:
        raise CaptureError(
            f"the model computes differently in train and in eval mode: {e}. Each mode needs a graph of its own"
        ) from None


def same_graphs(left: Graph, right: Graph, constants: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Say whether two captures compute the same values, ignoring arithmetic on sizes; arguments as for `merge`."""
    try:
        return _Merge(left, right, _lifted(constants), _lifted(others)).is_same()
    except Differ:
        return False


def _lifted(constants: Mapping[str, Any]) -> Callable[[str], Any]:
    return lambda target: constants.get(target.removeprefix("_fxamp.")) if target.startswith("_fxamp.") else None


def follows_mode(graph: Graph) -> bool:
    """Say whether a graph captured in one mode has ops that a training flag decides on."""
    return any(
        isinstance(n.target, OpOverload) and any(a.name in _FLAGS for a in own_schema(n.target).arguments)
        for n in graph.nodes
    )


class _Merge(Walk):
    """The train graph and the eval graph."""

    def __init__(self, left: Graph, right: Graph, held: Callable[[str], Any], other: Callable[[str], Any]) -> None:
        super().__init__(left, right, held, other)
        self.flags: dict[str, Node] = {}
        self.only_train: set[Node] = set()  # dropout nodes that only the graph of train mode has

    def run(self) -> Graph:
        """Make the literals of the train graph follow the training flags."""
        for node, other in self._align():
            changes = list(self.literals(node, other))
            if note_of(node).reads != note_of(other).reads:
                raise Differ(node, other)
            if changes:
                args, kwargs = spelled_out(node, other)[0]
                changed = {path: self._chosen(node, other, a, b) for path, a, b in changes}
                node.args, node.kwargs = _substituted((args, kwargs), changed)
            self._agree_on_autocast(node, other)
        return self.left

    def is_same(self) -> bool:
        """Say whether the two graphs are the same."""
        pairs = self._align(exact=True)
        return not any(list(self.literals(a, b)) or note_of(a).reads != note_of(b).reads for a, b in pairs)

    def _align(self, exact: bool = False) -> list[tuple[Node, Node]]:
        """Pair the nodes of both graphs; only the train graph may have batch norm's batch counter and dropouts."""
        left, right = ([n for n in g.nodes if counts(n)] for g in (self.left, self.right))
        pairs, j = [], 0
        for node in left:
            if j < len(right) and same_call(node, right[j]):
                pairs.append((node, right[j]))
                self.pair(node, right[j])
                j += 1
            elif _is_batch_counter(node) and not exact:
                self._count_in_training(node)
            elif node.target in _DROPOUTS and not exact:
                node.args, node.kwargs = _dropout(node, self._flag(module_path(node))), {}
                self.only_train.add(node)
            else:
                raise Differ(node, right[j] if j < len(right) else None)
        if j < len(right):
            raise Differ(None, right[j])
        return pairs

    def _agree_on_autocast(self, node: Node, other: Node) -> None:
        """Keep the notes on dtypes under autocast where both modes agree."""
        if note_of(node).autocast != note_of(other).autocast:
            note(node, autocast=None)

    def _count_in_training(self, node: Node) -> None:
        """Replace the `add_` by which batch norm counts batches with `count_`."""
        with self.left.inserting_before(node):
            values = self._values_per_channel(module_path(node))
            counted = self.left.call_function(count_, (node.args[0], self._flag(module_path(node)), *values))
        counted.meta = origin(node) | {k: node.meta[k] for k in ("val",) if k in node.meta}
        note(counted, autocast=note_of(node).autocast)
        node.replace_all_uses_with(counted)
        self.left.erase_node(node)

    def _values_per_channel(self, norm: str) -> list[Node]:
        """Return the number of values per channel of a batch norm, if it depends only on the batch size."""
        norms = self.left.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default)
        x = next((n.args[0] for n in norms if module_path(n) == norm), None)
        if not isinstance(x, Node) or any(size != 1 for size in x.meta["val"].shape[2:]):
            return []
        size = self.left.call_function(torch.ops.aten.sym_size.int, (x, 0))
        size.meta["val"] = x.meta["val"].shape[0]
        return [size]

    def _chosen(self, node: Node, other: Node, a: Any, b: Any) -> Any:
        """Return a value that is the train graph's literal in train mode and the eval graph's in eval mode."""
        if not isinstance(a, _PLAIN) or not isinstance(b, _PLAIN):
            raise Differ(node, other)
        flag = self._flag(module_path(node))
        if a is True and b is False:
            return flag
        with self.left.inserting_before(node):
            chosen = self.left.call_function(by_mode, (flag, a, b))
        chosen.meta = origin(node) | {"val": a}
        return chosen

    def same_value(self, a: Node, b: Node) -> bool:
        """Compare two operands, looking through dropouts that only the train graph has."""
        while a in self.only_train:
            a = a.args[0]  # type: ignore[assignment]
        return super().same_value(a, b)

    def _flag(self, owner: str) -> Node:
        if owner not in self.flags:
            with self.left.inserting_before(next(iter(self.left.nodes))):
                node = self.left.create_node("get_attr", f"{owner}.training".lstrip("."))
            node.meta["val"] = True
            self.flags[owner] = node
        return self.flags[owner]


def _substituted(value: Any, changed: dict[Path, Any], path: Path = ()) -> Any:
    """Return (args, kwargs) with other literals at some paths, which begin with 0 for args and 1 for kwargs."""
    if path in changed:
        return changed[path]
    if isinstance(value, (list, tuple)):
        return type(value)(_substituted(v, changed, (*path, i)) for i, v in enumerate(value))
    if isinstance(value, dict):
        return {k: _substituted(v, changed, (*path, k)) for k, v in value.items()}
    if isinstance(value, slice):
        parts = (_substituted(getattr(value, k), changed, (*path, k)) for k in ("start", "stop", "step"))
        return slice(*parts)
    return value


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
    """Return the arguments of a dropout with its flag put in; `F.dropout` may have them by name."""
    given = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | dict(node.kwargs)
    rest = (given["inplace"],) if given.get("inplace") else ()
    return given["input"], given.get("p", 0.5), flag, *rest
