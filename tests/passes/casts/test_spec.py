"""Each law of an emitted graph: a graph that breaks it, and one like it that does not."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from passes.casts.verify import LAWS, broken, verify
from passes.contract.errors import VerificationError
from passes.contract.reasons import Code, Reason
from passes.form import Assignment, Choice
from passes.graph.aliases import mutated_operands
from passes.graph.notes import CAST_OPERAND, is_inserted, note
from passes.ops.rules import LOW
from passes.runtime.casts import CAST
from tests.support.exported import traced_of
from tests.support.graphs import Builder, as_it_stands, parse
from tests.support.helpers import Two, example

BF16 = torch.bfloat16

# Law -> graphs that break it, graphs that do not.
TABLE: dict[str, tuple[list[str], list[str]]] = {
    "written copy": (
        [
            """
            x: f32[2, 4]
            y: bf16[2, 4]
            low: bf16[2, 4] = cast(x, bf16)
            total: bf16[2, 4] = add_.Tensor(low, y)
            return total
            """,
            """
            x: f32[2, 4]
            low: bf16[2, 4] = cast(x, bf16)
            row: bf16[4] = select.int(low, 0, 0)
            zero: bf16[4] = zero_(row)
            return x
            """,
            """
            x: f32[2, 4]
            up: bf16[2, 4] = cast(x, bf16)
            own: bf16[2, 4] = to.dtype(up, bf16)
            zero: bf16[2, 4] = zero_(own)
            return x
            """,
        ],
        [
            """
            x: f32[2, 4]
            y: bf16[2, 4]
            wide: f32[2, 4] = cast(y, f32)
            sum: f32[2, 4] = add_.Tensor(x, wide)
            return sum
            """,
            """
            x: f32[2, 4]
            low: bf16[2, 4] = cast(x, bf16)
            copy: bf16[2, 4] = clone(low)
            zero: bf16[2, 4] = zero_(copy)
            return zero
            """,
        ],
    ),
    "stale copy": (
        [
            """
            x: f32[2, 4]
            low: bf16[2, 4] = cast(x, bf16)
            flat: bf16[8] = view(low, [8])
            zero: f32[2, 4] = zero_(x)
            relu: bf16[8] = relu(flat)
            return relu
            """,
            """
            x: f32[2, 4]
            row: f32[4] = select.int(x, 0, 0)
            low: bf16[2, 4] = cast(x, bf16)
            relu: bf16[2, 4] = relu(low)
            zero: f32[4] = zero_(row)
            sin: bf16[2, 4] = sin(low)
            return relu, sin
            """,
        ],
        [
            """
            x: f32[2, 4]
            low: bf16[2, 4] = cast(x, bf16)
            flat: bf16[8] = view(low, [8])
            relu: bf16[8] = relu(flat)
            zero: f32[2, 4] = zero_(x)
            after: bf16[2, 4] = cast(zero, bf16)
            sin: bf16[2, 4] = sin(after)
            return relu, sin
            """,
            """
            x: f32[2, 4]
            low: bf16[2, 4] = cast(x, bf16)
            sum: f32[2, 4] = add_.Tensor(x, low)
            return sum
            """,
        ],
    ),
    "other grad mode": (
        [
            """
            x: f32[2, 4]
            low: bf16[2, 4] = cast(x, bf16)
            off = set_grad(False)
            relu: bf16[2, 4] = relu(low)
            on = set_grad(True)
            return relu
            """
        ],
        [
            """
            x: f32[2, 4]
            off = set_grad(False)
            low: bf16[2, 4] = cast(x, bf16)
            relu: bf16[2, 4] = relu(low)
            on = set_grad(True)
            return relu
            """
        ],
    ),
    "cast statistics": (
        [
            """
            x: bf16[2, 4]
            mean: f32[4] = buffer
            var: f32[4] = buffer
            low: bf16[4] = cast(mean, bf16)
            norm: bf16[2, 4] = batch_norm(x, None, None, low, var, False, 0.1, 1e-5, False)
            return norm
            """
        ],
        [
            """
            x: f32[2, 4]
            mean: f32[4] = buffer
            var: f32[4] = buffer
            low: bf16[2, 4] = cast(x, bf16)
            norm: bf16[2, 4] = batch_norm(low, None, None, mean, var, False, 0.1, 1e-5, False)
            return norm
            """
        ],
    ),
    "no float": (
        [
            """
            x: i64[2, 4]
            low: bf16[2, 4] = cast(x, bf16)
            relu: bf16[2, 4] = relu(low)
            return relu
            """,
            """
            x: f64[2, 4]
            low: bf16[2, 4] = cast(x, bf16)
            return low
            """,
        ],
        [
            """
            x: i64[2, 4]
            low: bf16[2, 4] = to.dtype(x, bf16)
            wide: f32[2, 4] = cast(low, f32)
            return wide
            """
        ],
    ),
    "unread": (
        [
            """
            x: f32[2, 4]
            low: bf16[2, 4] = cast(x, bf16)
            relu: f32[2, 4] = relu(x)
            return relu
            """
        ],
        [
            """
            x: f32[2, 4]
            own: bf16[2, 4] = to.dtype(x, bf16)
            relu: f32[2, 4] = relu(x)
            return relu
            """
        ],
    ),
    "missing cast": (
        [
            """
            x: bf16[2, 4]
            w: f32[4, 4] = param
            low: bf16[4, 4] = cast(w, bf16)
            linear: bf16[2, 4] = linear(x, low)
            return linear
            """
        ],
        [
            """
            x: f32[2, 4]
            w: f32[4, 4] = param
            narrow: bf16[2, 4] = cast(x, bf16)
            low: bf16[4, 4] = cast(w, bf16)
            linear: bf16[2, 4] = linear(narrow, low)
            return linear
            """,
            """
            x: f32[2, 4]
            linear: f16[2, 4] = softmax.int(x, -1, dtype=f16)
            return linear
            """,
        ],
    ),
}


def judged(text: str, legal: bool) -> tuple[GraphModule, Assignment]:
    """Return a graph whose node `linear` was decided to run low; if it is not legal, on an FP32 operand."""
    gm = parse(text)
    assignment = as_it_stands(gm)
    for node in gm.graph.nodes:
        if node.name == "linear":
            choice = Choice(BF16, Reason(Code.LOW, "matrix product", LOW))
            dtypes = {} if legal else {node.args[0]: torch.float32}
            assignment = replace(assignment, colours={node: choice}, dtypes={**assignment.dtypes, **dtypes})
    return gm, assignment


def cases(legal: bool) -> list[tuple[str, str]]:
    return [(law, text) for law, texts in TABLE.items() for text in texts[legal]]


def test_every_law_has_graphs() -> None:
    assert sorted(law.name for law in LAWS) == sorted(TABLE)
    assert all(itertools.chain.from_iterable(TABLE.values()))


@pytest.mark.parametrize(("law", "text"), cases(False))
def test_a_graph_that_breaks_a_law_is_found(law: str, text: str) -> None:
    gm, assignment = judged(text, False)
    found = broken(gm.graph, assignment)
    assert found is not None
    assert found[2].name == law


@pytest.mark.parametrize(("law", "text"), cases(True))
def test_a_graph_that_breaks_no_law_is_legal(law: str, text: str) -> None:
    gm, assignment = judged(text, True)
    assert broken(gm.graph, assignment) is None


def test_verify_names_the_node_the_operand_and_the_law() -> None:
    gm, assignment = judged(TABLE["written copy"][0][0], False)
    with pytest.raises(
        VerificationError, match=r"^add_ \(node total, .*operand low: may write to it.*law: written copy"
    ):
        verify(gm.graph, assignment)


def touch(x: Tensor) -> Tensor:
    return x.mul_(2)


def test_what_an_unknown_function_is_given_counts_as_written() -> None:
    builder = Builder()
    x = builder.input("x", (2, 4))
    low = builder.call(CAST, x, BF16)
    note(low, made_by=CAST_OPERAND)
    touched = builder.call(touch, low)
    gm = builder.finish(touched)
    found = broken(gm.graph, as_it_stands(gm))
    assert found is not None
    assert found[2].name == "written copy"


def touched(self: Two, x: Tensor) -> Tensor:
    """Write by a function that the compiler cannot look into."""
    y = self.l(x)
    touch(y)
    return self.m(y)


torch.fx.wrap("touch")


def test_a_compiler_that_forgets_that_unknown_functions_may_write_is_found_out() -> None:
    traced_of(Two(touched), example(), "O1,dtype=bf16")
    with (
        mock.patch("passes.assign.colour.decide.may_write", mutated_operands),
        pytest.raises(VerificationError, match="law: written copy"),
    ):
        traced_of(Two(touched), example(), "O1,dtype=bf16")


def _chain(outputs: int) -> GraphModule:
    """Return a graph of so many casts, each read, and written views between them."""
    builder = Builder()
    x = builder.input("x", (4, 4))
    made: list[Node] = []
    for i in range(outputs):
        low = builder.call(CAST, x, BF16)
        note(low, made_by=CAST_OPERAND)
        made.append(builder.call(torch.ops.aten.relu.default, low))
        if i % 10 == 0:
            builder.call(torch.ops.aten.add_.Tensor, builder.call(torch.ops.aten.select.int, x, 0, 0), 1.0)
    return builder.finish(*made)


def test_time_is_linear_in_the_graph() -> None:
    seconds = []
    for outputs in (500, 4000):
        gm = _chain(outputs)
        assignment = as_it_stands(gm)
        took = []
        for _ in range(3):
            start = time.process_time()
            assert broken(gm.graph, assignment) is None
            took.append(time.process_time() - start)
        seconds.append(min(took) / outputs)
        assert sum(map(is_inserted, gm.graph.nodes)) == outputs
    assert seconds[1] < 2 * seconds[0]
