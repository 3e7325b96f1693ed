"""What is known of an op stands in its row: no other file has a collection of names of ops."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from passes.ops import ops
from passes.ops.rules import RULES
from passes.ops.table.queries import HIGHER_ORDER, QUERIES

ROOT = Path(__file__).parents[3]
ROOM = ROOT / "passes" / "ops"
LISTS = ROOT / "passes" / "contract" / "devices.py"  # the lists of a device are data of its row
FILES = [
    p
    for package in ("passes", "fxamp")
    for p in sorted((ROOT / package).rglob("*.py"))
    if ROOM not in p.parents and p != LISTS
]
KNOWN = RULES.keys() | {row.name for row in (*QUERIES, *HIGHER_ORDER)}
SPACES = {"torch": torch, "F": F, "nn": nn, "operator": operator, "aten": torch.ops.aten}

# File and ops of a collection that is not knowledge of ops: why.
_KERNELS = "functions that compute as a kernel of the op does"
_CHOICE = "which of them an argument of the op, and so of the site, is looked up for"
_INDUCTOR = "how Inductor lowers an op of its own decomposed graph, which no rule of precision asks"
ALLOWED: dict[tuple[str, frozenset[str]], str] = {
    (
        "fxamp/observe/emulation.py",
        frozenset({"scaled_dot_product_attention", "log_softmax", "cross_entropy_loss"}),
    ): _KERNELS,
    ("fxamp/observe/emulation.py", frozenset({"topk", "argmax"})): _CHOICE,
    ("fxamp/observe/emulation.py", frozenset({"sum", "log"})): "parts of a kernel, as the function for it names them",
    (
        "fxamp/train/at_rest.py",
        frozenset(["cat", "embedding", "index", "index_put", "scatter", "scatter_add"]),
    ): _INDUCTOR,
    (
        "fxamp/observe/fused.py",
        frozenset(
            {
                "alias",
                "clone",
                "expand",
                "full",
                "getitem",
                "permute",
                "reshape",
                "select",
                "slice",
                "squeeze",
                "unsqueeze",
                "view",
            }
        ),
    ): _INDUCTOR,
    (
        "fxamp/observe/fused.py",
        frozenset(["cat", "constant_pad_nd", "split", "split_with_sizes", "t", "transpose"]),
    ): _INDUCTOR,
}


def op_named(word: str) -> str:
    """Return the op that a word is the name of, "" where it is none."""
    found = ops.canonical(word.removeprefix("higher_order::")).removesuffix("_")
    return next((op for op in (found, f"higher_order::{found}") if op in KNOWN), "")


def op_of(node: ast.expr) -> str:
    """Return the op that an element of a collection stands for: its name, or a function of torch's."""
    if isinstance(node, ast.Constant):
        return op_named(node.value) if isinstance(node.value, str) else ""
    space, _, path = ast.unparse(node).partition(".")
    if not isinstance(node, ast.Attribute) or space not in SPACES:
        return ""
    try:
        found: Any = operator.attrgetter(path)(SPACES[space])
    except AttributeError:
        return ""
    return op_named(ops.of_target(found)) if callable(found) and not isinstance(found, type) else ""


def words_of(text: str) -> set[str]:
    """Return the ops in a text of names, such as one that is split, or a pattern; none in a sentence."""
    words = [word.partition(".")[0] for word in re.split(r"[\s|,()]+", text) if word]
    found = [op for word in words if (op := op_named(word))]
    return set(found) if 3 * len(found) >= 2 * len(words) else set()


def collections(source: str) -> Iterator[tuple[int, frozenset[str]]]:
    """Yield line and ops of every collection that names several."""
    tree = ast.parse(source)
    docstrings = {
        id(n.body[0].value)
        for n in ast.walk(tree)
        if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)) and n.body and isinstance(n.body[0], ast.Expr)
    }
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.expr)):
        found: set[str] = set()
        if isinstance(node, (ast.Set, ast.Tuple, ast.List)):
            found = {op for e in node.elts if (op := op_of(e))}
        elif isinstance(node, ast.Dict):
            found = {op for e in node.keys if e is not None and (op := op_of(e))}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found = words_of(node.value)
        if len(found) > 1:
            yield node.lineno, frozenset(found)


def test_names_of_ops_are_collected_in_their_rows_alone() -> None:
    named = {p.relative_to(ROOT).as_posix(): list(collections(p.read_text("utf-8"))) for p in FILES}
    found = [f"{name}:{line}: {set(ops)}" for name in named for line, ops in named[name] if (name, ops) not in ALLOWED]
    assert found == [], "make it a column of passes/ops/table/row.py, and ask row_of(node)"
    assert all(ALLOWED.values()), "what is allowed has a reason"
    assert ALLOWED.keys() <= {(name, ops) for name in named for _, ops in named[name]}, "it is there no more"


@pytest.mark.parametrize(
    "source",
    [
        'X = ("softmax", "exp")',
        'X = frozenset(["to", "type_as"])',
        'X = {torch.zeros: "a", torch.ones: "b"}',
        "X = (torch.ops.aten.add.Tensor, F.relu)",
        'X = frozenset("softmax layer_norm".split())',
        'X = re.compile("softmax|layer_norm")',
        "if name in {'size', 'dim'}: pass",
        "X = {operator.iadd, operator.isub}",
        'X = """add.Tensor addmm.default"""',
        'X = frozenset(["cond", "while_loop"])',
        'X = ("higher_order::wrap", "higher_order::cond")',
    ],
)
def test_a_collection_is_found_however_it_is_written(source: str) -> None:
    assert list(collections(source))


@pytest.mark.parametrize(
    "source",
    [
        '"""softmax layer_norm"""',
        'X = ("softmax", "linear algebra")',
        'raise ValueError("add the mean to all of them")',
        'X = (torch.add, operator.add, "add")',
    ],
)
def test_one_op_and_a_sentence_are_no_collection(source: str) -> None:
    assert not list(collections(source))


def test_the_compiler_asks_rows_and_compares_no_name_of_an_op() -> None:
    compared = [
        f"{p.relative_to(ROOT)}:{n.lineno}: {ast.unparse(n)}"
        for p in FILES
        if ROOT / "passes" in p.parents
        for n in ast.walk(ast.parse(p.read_text("utf-8")))
        if isinstance(n, ast.Compare) and "name" in ast.unparse(n.left)
        for e in n.comparators
        if isinstance(e, ast.Constant) and isinstance(e.value, str) and op_named(e.value)
    ]
    assert compared == [], "make it a column of passes/ops/table/row.py, and ask row_of(node)"


def test_no_op_has_two_rows() -> None:
    from passes.ops import rules

    names = [row.name for row in (*rules.ROWS, *QUERIES, *HIGHER_ORDER)]
    assert not {n for n in names if names.count(n) > 1}
