"""Add guards against the sizes 1 and 0 if a model computes something different at these sizes.

The exporter assumes that every dynamic size is at least 2. If that decides a branch, such as `if x.shape[1] > 1`, the
graph shows no trace of it. So the model and its graph are both run at small sizes, on fake tensors, which have sizes
but no values, so that no kernel runs. If the ops that they call differ more than at the example's sizes, where they are
mostly the same, a guard is added. A model that cannot run on fake tensors, because its control flow depends on data,
gets the guards without this test.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from passes._torch import FakeTensorMode, TorchDispatchMode, own_schema, pytree, quiet_fakes, undecided_by_fakes

from ..capture.model.call import CallSpec

_EQUAL = re.compile(r"args\[(\d+)\]\.size\(\)\[(\d+)\] == args\[(\d+)\]\.size\(\)\[(\d+)\]")
_PLAIN = (bool, int, float, complex, torch.dtype)
_SCALARS = ("number", "float", "bool", "Scalar", "ScalarType", "Tensor")  # arguments whose plain values are no sizes
# Not kernels: a question that fake tensors answer, and a check that only an exported graph has.
_NO_KERNELS = (torch.ops.prim.device.default, torch.ops.aten._assert_tensor_metadata.default)
_NONE: Any = (Counter(), Counter(), True)  # the result of `_difference` where nothing differs
Dimension = tuple[int, int]  # which tensor, which of its dimensions
Run = Callable[[list[Any]], Any]  # takes flat tensors


class _Calls(TorchDispatchMode):
    """Count the kernels that are called, with their numeric arguments; views are ignored, since they move no data."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[Any] = Counter()
        self._mode = mode

    def _faked(self, value: Any) -> Any:
        """Return a parameter as a fake tensor: fake mode does not cache the results of calls on real ones."""
        return self._mode.from_tensor(value, static_shapes=True) if type(value) is nn.Parameter else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NO_KERNELS:
            return func(*args, **(kwargs or {}))
        args, kwargs = tuple(map(self._faked, args)), kwargs or {}
        if not _is_view(func):
            positional, named = _scalars_of(func)
            given = [args[i] for i in positional if i < len(args)] + [kwargs[n] for n in named if n in kwargs]
            self.count[(func, *((type(v), v) for v in given if isinstance(v, _PLAIN)))] += 1
        return func(*args, **kwargs)


@functools.cache
def _scalars_of(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the positions and names of an op's arguments that are numbers, but not sizes."""
    kinds = [str(a.type).removeprefix("Optional[").removesuffix("]") for a in own_schema(func).arguments]
    found = [i for i, kind in enumerate(kinds) if kind in _SCALARS]
    return tuple(found), tuple(own_schema(func).arguments[i].name for i in found)


@functools.cache
def _is_view(func: Any) -> bool:
    returned = own_schema(func).returns
    only_views = bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)
    return only_views or own_schema(func).name in ("aten::lift_fresh", "aten::lift_fresh_copy", "aten::detach")


def guards_of_small_sizes(call: CallSpec, tensors: Sequence[torch.Tensor], model: Run, graph: Run) -> list[str]:
    """Return the guards that a graph needs in addition to those that it has.

    Args:
        call: how the graph is called.
        tensors: example inputs.
        model: calls the model.
        graph: calls the graph.
    """
    if call.in_spec is None:
        return []
    holds, out, usual = call.guard_function(), [], None
    for dimensions in _dimensions(call):
        if any(tensors[i].shape[d] < 2 for i, d in dimensions):
            continue
        for size in (1, 0):
            cut = {at: {d for i, d in dimensions if i == at} for at, _ in dimensions}
            if not _hold(holds, [_meta(t, cut.get(i, set()), size) for i, t in enumerate(tensors)]):
                continue
            try:
                difference = _difference(tensors, cut, size, model, graph)
                differs = difference != _NONE
                if differs:  # the calls at the example's sizes may differ as much
                    usual = usual if usual is not None else _difference(tensors, {}, 0, model, graph)
                    differs = difference != usual
            except Exception as e:  # a model may reject such inputs by any error
                differs = undecided_by_fakes(e)
            if differs:
                tensor, dimension = dimensions[0]
                out.append(f"args[{tensor}].size()[{dimension}] >= {size + 1}")
                break
    return out


def _difference(tensors: Sequence[torch.Tensor], cut: dict[int, set[int]], size: int, model: Run, graph: Run) -> Any:
    """Return the calls that one of model and graph makes and the other does not, and whether the results look alike."""
    made = []
    for run in (model, graph):
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        calls = _Calls(mode)
        fakes = [mode.from_tensor(t.detach(), static_shapes=True) for t in tensors]
        with quiet_fakes(), mode, torch.compiler.set_stance("force_eager"):  # torch.cond would compile itself
            given = [_cut(t, cut.get(i, set()), size) for i, t in enumerate(fakes)]
            given = [g.requires_grad_(t.requires_grad) for g, t in zip(given, tensors, strict=True)]
            with calls:
                output = run(given)
        shapes = [(o.shape, o.dtype) for o in pytree.tree_leaves(output) if isinstance(o, torch.Tensor)]
        made.append((calls.count, shapes))
    (ours, shapes), (theirs, others) = made
    return ours - theirs, theirs - ours, shapes == others


def _hold(guards: Callable[..., list[bool]] | None, tensors: list[Any]) -> bool:
    try:
        return guards is None or False not in guards(*tensors)
    except ZeroDivisionError:  # a guard on divisibility takes a size as divisor
        return False


def _dimensions(call: CallSpec) -> Iterator[list[Dimension]]:
    """Yield the dynamic dimensions of the inputs, grouped where they must be equal."""
    leaves = [leaf for leaf in call.leaves if leaf.tensor]
    free = [
        (i, d) for i, leaf in enumerate(leaves) for d in range(leaf.ndim or 0) if d not in {d for d, _ in leaf.static}
    ]
    equal: dict[Dimension, Dimension] = {}
    for guard in call.guards:
        if found := _EQUAL.fullmatch(guard):
            a, b, c, d = map(int, found.groups())
            equal[c, d] = (a, b)
    groups: dict[Dimension, list[Dimension]] = {}
    for dimension in free:
        groups.setdefault(equal.get(dimension, dimension), []).append(dimension)
    return iter(groups.values())


def _meta(tensor: torch.Tensor, dimensions: set[int], size: int) -> torch.Tensor:
    return torch.empty([size if d in dimensions else n for d, n in enumerate(tensor.shape)], device="meta")


def _cut(tensor: torch.Tensor, dimensions: set[int], size: int) -> torch.Tensor:
    for dimension in dimensions:
        tensor = tensor.narrow(dimension, 0, size)
    return tensor.clone() if dimensions else tensor
