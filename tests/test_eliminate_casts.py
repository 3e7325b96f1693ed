"""Each rule: a graph on which it fires, and those on which it must not."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

from passes.eliminate_casts import eliminate_casts
from tests.graphs import as_it_stands, assert_rewrites, assert_unchanged, parse


def eliminate(gm: GraphModule, share: str = "always") -> dict[str, int]:
    return eliminate_casts(gm.graph, as_it_stands(gm), share)


def fired(no_op: int = 0, round_trip: int = 0, share: int = 0) -> dict[str, int]:
    return {"no_op": no_op, "round_trip": round_trip, "share": share}


# no_op


def test_a_cast_to_the_dtype_that_a_value_has_goes() -> None:
    assert_rewrites(
        eliminate,
        """
        x: bf16[2, 3]
        cast: bf16[2, 3] = cast(x, bf16)
        relu: bf16[2, 3] = relu(cast)
        return relu
        """,
        """
        x: bf16[2, 3]
        relu: bf16[2, 3] = relu(x)
        return relu
        """,
        edits=fired(no_op=1),
    )


def test_a_cast_to_another_dtype_stays() -> None:
    assert_unchanged(
        eliminate,
        """
        x: bf16[2, 3]
        cast: f16[2, 3] = cast(x, f16)
        relu: f16[2, 3] = relu(cast)
        return relu
        """,
    )


def test_a_users_cast_to_the_dtype_that_a_value_has_stays() -> None:
    assert_unchanged(
        eliminate,
        """
        x: bf16[2, 3]
        same: bf16[2, 3] = to.dtype(x, bf16)
        relu: bf16[2, 3] = relu(same)
        return relu
        """,
    )


# round_trip


def test_widening_and_back_goes() -> None:
    assert_rewrites(
        eliminate,
        """
        x: bf16[2, 3]
        wide: f32[2, 3] = cast(x, f32)
        back: bf16[2, 3] = cast(wide, bf16)
        relu: bf16[2, 3] = relu(back)
        return relu
        """,
        """
        x: bf16[2, 3]
        relu: bf16[2, 3] = relu(x)
        return relu
        """,
        edits=fired(round_trip=1),
    )


def test_the_wide_value_stays_for_its_other_readers() -> None:
    assert_rewrites(
        eliminate,
        """
        x: f16[2, 3]
        wide: f32[2, 3] = cast(x, f32)
        exp: f32[2, 3] = exp(wide)
        back: f16[2, 3] = cast(wide, f16)
        relu: f16[2, 3] = relu(back)
        return exp, relu
        """,
        """
        x: f16[2, 3]
        wide: f32[2, 3] = cast(x, f32)
        exp: f32[2, 3] = exp(wide)
        relu: f16[2, 3] = relu(x)
        return exp, relu
        """,
        edits=fired(round_trip=1),
    )


@pytest.mark.parametrize(
    ("middle", "last", "kinds"),
    [
        ("cast(x, f32)", "to.dtype(wide, bf16)", "the second is the author's"),
        ("to.dtype(x, f32)", "cast(wide, bf16)", "the first is the author's"),
        ("to.dtype(x, f32)", "to.dtype(wide, bf16)", "both are the author's"),
    ],
)
def test_a_round_trip_with_a_users_cast_stays(middle: str, last: str, kinds: str) -> None:
    assert_unchanged(
        eliminate,
        f"""
        x: bf16[2, 3]
        wide: f32[2, 3] = {middle}
        back: bf16[2, 3] = {last}
        relu: bf16[2, 3] = relu(back)
        return relu
        """,
    )


@pytest.mark.parametrize("kind", ["cast", "to.dtype"])
def test_narrowing_and_back_stays_for_it_rounds(kind: str) -> None:
    assert_unchanged(
        eliminate,
        f"""
        x: f32[2, 3]
        low: bf16[2, 3] = {kind}(x, bf16)
        back: f32[2, 3] = {kind}(low, f32)
        relu: f32[2, 3] = relu(back)
        return relu
        """,
    )


@pytest.mark.parametrize(
    "dtypes", [("bf16", "f16", "bf16"), ("f16", "bf16", "f16"), ("f32", "bf16", "f16"), ("bf16", "f32", "f16")]
)
def test_casts_through_another_low_dtype_stay(dtypes: tuple[str, str, str]) -> None:
    first, middle, last = dtypes
    assert_unchanged(
        eliminate,
        f"""
        x: {first}[2, 3]
        other: {middle}[2, 3] = cast(x, {middle})
        back: {last}[2, 3] = cast(other, {last})
        relu: {last}[2, 3] = relu(back)
        return relu
        """,
    )


def test_a_round_trip_of_a_value_written_later_stays_for_it_is_a_copy() -> None:
    assert_unchanged(
        eliminate,
        """
        x: bf16[2, 3]
        wide: f32[2, 3] = cast(x, f32)
        back: bf16[2, 3] = cast(wide, bf16)
        add_: bf16[2, 3] = add_.Tensor(x, 1)
        relu: bf16[2, 3] = relu(back)
        return relu
        """,
    )


def test_a_round_trip_that_is_returned_stays_for_an_output_is_no_input() -> None:
    assert_unchanged(
        eliminate,
        """
        x: bf16[2, 3]
        wide: f32[2, 3] = cast(x, f32)
        back: bf16[2, 3] = cast(wide, bf16)
        return back
        """,
    )


# share

TWO_READERS = """
    x: f32[2, 3]
    once: bf16[2, 3] = cast(x, bf16)
    relu: bf16[2, 3] = relu(once)
    twice: bf16[2, 3] = cast(x, bf16)
    neg: bf16[2, 3] = neg(twice)
    return relu, neg
"""


def test_equal_casts_are_shared() -> None:
    assert_rewrites(
        eliminate,
        TWO_READERS,
        """
        x: f32[2, 3]
        once: bf16[2, 3] = cast(x, bf16)
        relu: bf16[2, 3] = relu(once)
        neg: bf16[2, 3] = neg(once)
        return relu, neg
        """,
        edits=fired(share=1),
    )


def test_casts_of_one_value_to_two_dtypes_are_not_shared() -> None:
    assert_unchanged(eliminate, TWO_READERS.replace("cast(x, bf16)\n    neg: bf16", "cast(x, f16)\n    neg: f16")
                     .replace("twice: bf16", "twice: f16"))  # fmt: skip


@pytest.mark.parametrize("share", ["never", "weights"])
def test_casts_of_activations_are_not_shared_when_the_policy_says_so(share: str) -> None:
    assert_unchanged(lambda gm: eliminate(gm, share), TWO_READERS)


TWO_LAYERS = """
    x: bf16[2, 3]
    w: f32[3, 3] = param
    once: bf16[3, 3] = cast(w, bf16)
    linear: bf16[2, 3] = linear(x, once)
    twice: bf16[3, 3] = cast(w, bf16)
    linear_1: bf16[2, 3] = linear(linear, twice)
    return linear_1
"""


@pytest.mark.parametrize("share", ["always", "weights"])
def test_casts_of_a_weight_are_shared(share: str) -> None:
    assert_rewrites(
        lambda gm: eliminate(gm, share),
        TWO_LAYERS,
        """
        x: bf16[2, 3]
        w: f32[3, 3] = param
        once: bf16[3, 3] = cast(w, bf16)
        linear: bf16[2, 3] = linear(x, once)
        linear_1: bf16[2, 3] = linear(linear, once)
        return linear_1
        """,
        edits=fired(share=1),
    )


def test_casts_of_a_weight_are_not_shared_when_the_policy_says_never() -> None:
    assert_unchanged(lambda gm: eliminate(gm, "never"), TWO_LAYERS)


def test_casts_of_a_weight_that_is_read_twice_are_shared() -> None:
    gm = parse(TWO_LAYERS)
    second = next(n for n in gm.graph.nodes if n.name == "twice")
    with gm.graph.inserting_before(second):
        again = gm.graph.get_attr("w")
    again.meta.update(second.args[0].meta)
    second.args = (again, torch.bfloat16)
    assert eliminate(gm) == fired(share=1)


def test_users_casts_are_not_shared() -> None:
    assert_unchanged(eliminate, TWO_READERS.replace("cast(x", "to.dtype(x"))


@pytest.mark.parametrize(
    "write",
    [
        "write: f32[2, 3] = mul_.Tensor(x, 2)",
        "write: f32[2, 3] = copy_(x, y)",
        "write: f32[2, 3] = add.out(x, y, out=x)",
        "view: f32[3] = select.int(x, 0, 1)\n    write: f32[3] = zero_(view)",
        "halves = unsafe_chunk(x, 2)\n    half: f32[1, 3] = getitem(halves, 0)\n    write: f32[1, 3] = relu_(half)",
        "other: f32[6] = reshape(x, [6])\n    write: f32[6] = fill_.Scalar(other, 1)",
    ],
    ids=["mul_", "copy_", "out", "view", "chunk", "reshape"],
)
def test_casts_before_and_after_a_write_are_not_shared(write: str) -> None:
    text = TWO_READERS.replace("    twice", f"    {write}\n    twice").replace(
        "[2, 3]\n    once", "[2, 3]\n    y: f32[2, 3]\n    once"
    )
    assert_unchanged(eliminate, text)


def test_casts_before_and_after_a_write_to_something_else_are_shared() -> None:
    text = TWO_READERS.replace("    twice", "    write: f32[2, 3] = mul_.Tensor(y, 2)\n    twice")
    gm = parse(text.replace("[2, 3]\n    once", "[2, 3]\n    y: f32[2, 3]\n    once"))
    assert eliminate(gm) == fired(share=1)


def test_casts_in_two_grad_modes_are_not_shared() -> None:
    assert_unchanged(
        eliminate,
        """
        x: f32[2, 3]
        mode = grad_enabled()
        off = set_grad(False)
        once: bf16[2, 3] = cast(x, bf16)
        relu: bf16[2, 3] = relu(once)
        on = set_grad(mode)
        twice: bf16[2, 3] = cast(x, bf16)
        neg: bf16[2, 3] = neg(twice)
        return relu, neg
        """,
    )


def test_casts_round_a_region_without_gradients_are_shared() -> None:
    assert_rewrites(
        eliminate,
        """
        x: f32[2, 3]
        once: bf16[2, 3] = cast(x, bf16)
        relu: bf16[2, 3] = relu(once)
        mode = grad_enabled()
        off = set_grad(False)
        inside: bf16[2, 3] = cast(x, bf16)
        abs_1: bf16[2, 3] = abs(inside)
        on = set_grad(mode)
        twice: bf16[2, 3] = cast(x, bf16)
        neg: bf16[2, 3] = neg(twice)
        return relu, abs_1, neg
        """,
        """
        x: f32[2, 3]
        once: bf16[2, 3] = cast(x, bf16)
        relu: bf16[2, 3] = relu(once)
        mode = grad_enabled()
        off = set_grad(False)
        inside: bf16[2, 3] = cast(x, bf16)
        abs_1: bf16[2, 3] = abs(inside)
        on = set_grad(mode)
        neg: bf16[2, 3] = neg(once)
        return relu, abs_1, neg
        """,
        edits=fired(share=1),
    )


def test_what_mutates_is_never_erased_though_nobody_reads_it() -> None:
    gm = parse(
        """
        x: f32[2, 3]
        cast: f32[2, 3] = cast(x, f32)
        add_: f32[2, 3] = add_.Tensor(x, 1)
        relu: f32[2, 3] = relu(cast)
        return relu
        """
    )
    assert eliminate(gm) == fired(no_op=1)
    assert "add_" in [n.name for n in gm.graph.nodes]
