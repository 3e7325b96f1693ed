"""Run torch's own samples of every op, and compare what `passes.graph.values` says of the call with what happened.

For a process of its own, for torch's test suite changes global settings when it is imported.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from passes._torch import pytree
from passes.graph.aliases import Aliases, mutated_operands
from passes.graph.values import dtypes_of
from passes.ops import ops
from passes.ops.rules import RULES, row_named

SAMPLES = 2  # of each op
SKIPPED = {"histogramdd"}  # it returns its bins, which nobody writes to
BY_FLAG = {"stft"}  # `return_complex` decides what it gives


def samples(info: Any, dtype: torch.dtype) -> list[Any]:
    """Return the first of an op's samples, none where it has no kernel for the dtype."""
    if dtype not in info.supported_dtypes("cpu"):
        return []
    # Not `sample_inputs`, which looks at the whole stack for the test that asks.
    return list(itertools.islice(info.sample_inputs_func(info, "cpu", dtype, False), SAMPLES))


def cases(info: Any) -> Iterator[tuple[list[Any], Any]]:
    """Yield (leaves, tree) of an op's samples: in FP32, with the first or all others of the floats low, complex."""
    for sample in samples(info, torch.float32):
        leaves, tree = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        floats = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dtype is torch.float32]
        yield leaves, tree
        for low in (floats[:1], floats[1:]) if len(floats) > 1 else ():
            yield [leaf.detach().bfloat16() if i in low else leaf for i, leaf in enumerate(leaves)], tree
    for sample in samples(info, torch.complex64):
        yield pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))


def as_node(function: Any, leaves: list[Any], tree: Any) -> tuple[Node, list[Any]]:
    """Return a call of the function, and the leaves with inputs of a graph in place of tensors."""
    graph = Graph()
    places = [graph.placeholder("x") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    for place, leaf in zip(places, leaves, strict=True):
        if isinstance(leaf, Tensor):
            place.meta["val"] = leaf
    args, kwargs = pytree.tree_unflatten(places, tree)
    return graph.call_function(function, args, kwargs), places


def storages(value: Any) -> set[int]:
    """Return where the tensors in a value are stored."""
    tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
    return {t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided and t.numel()}


def fits(word: str, dtype: Any) -> bool:
    """Say whether an output may have a dtype, by the word for it in the column `out` of its row."""
    if word in ("float", "first"):
        return isinstance(dtype, torch.dtype)  # of integers it may be one itself
    whole = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    return bool({"bool": dtype is torch.bool, "complex": dtype.is_complex}.get(word, whole))


def gives_other_outputs(op: str, out: Any) -> bool:
    """Say whether the results of a call contradict the row of its op; overloads differ in the number of outputs."""
    words, dtypes = row_named(op).out, [d for d in pytree.tree_leaves(dtypes_of(out)) if d is not None]
    if not row_named(op).known or len(set(words)) == 1:
        words = words * len(dtypes)  # a list has any number of them
    return len(dtypes) > len(words) or not all(map(fits, words, dtypes))


def false_claims(function: Any, leaves: list[Any], tree: Any) -> tuple[str, set[str]]:
    """Return an op's name and what is said of this call that is not so."""
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
    before = [storages(leaf) for leaf in leaves]
    try:
        with torch.no_grad():
            out = function(*args, **kwargs)
    except Exception:  # it takes no mixed operands
        return "", set()
    node, places = as_node(function, leaves, tree)
    for place in node.all_input_nodes:  # only what is written later counts as shared
        node.graph.call_function(torch.ops.aten.zero_.default, (place,))
    name, aliases, written = ops.name(node), Aliases(node.graph), mutated_operands(node)
    wrong = set()
    if name not in BY_FLAG and gives_other_outputs(name, out):
        wrong.add(f"{name} gives {dtypes_of(out)}, not {row_named(name).out}")
    for leaf, place, version, storage in zip(leaves, places, versions, before, strict=True):
        if storage & storages(out) and aliases.find(place) is not aliases.find(node):
            wrong.add(f"{name} shares storage")
        if isinstance(leaf, Tensor) and leaf._version != version and place not in written:
            wrong.add(f"{name} writes")
    return name, wrong


def sweep(every: int = 1) -> tuple[list[str], int]:
    """Sweep over every op, or every second and so on.

    Returns:
        The claims that are false, and how many ops of the table were run.
    """
    torch.set_num_threads(1)  # the samples are tiny
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

    wrong: set[str] = set()
    seen: set[str] = set()
    for info in op_db[::every]:
        unnamed = getattr(info.op, "__name__", "") == "<lambda>"
        if unnamed or info.name in SKIPPED or torch.float32 not in info.supported_dtypes("cpu"):
            continue
        for leaves, tree in cases(info):
            name, found = false_claims(info.op, leaves, tree)
            seen.add(name)
            wrong |= found
    return sorted(wrong), len(seen & set(RULES))
