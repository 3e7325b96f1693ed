"""Each rule: a graph on which it fires, and those on which it must not."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from fxamp.measure.counts import step_counts
from passes.casts.eliminate_casts import EliminateCasts
from passes.graph.bodies import origins_of
from passes.graph.notes import is_inserted, note_origins
from tests.support.exported import graph_of, plan_of
from tests.support.graphs import as_it_stands, assert_rewrites, assert_unchanged, parse, random_inputs, render, unit_of
from tests.support.helpers import Two, example, in_turns


def eliminate(gm: GraphModule, share: str = "always") -> dict[str, int]:
    return EliminateCasts(share)(unit_of(gm.graph, as_it_stands(gm)))


def fired(**rules: int) -> dict[str, int]:
    return (
        dict.fromkeys(
            ["no_op", "round_trip", "read", "share", "author", "promote", "dtype_argument", "share_storage"], 0
        )
        | rules
    )


# Graphs on which a rule fires: what it is given, what it makes of that, and the rule.
GOES: dict[str, tuple[str, str, str]] = {
    "a cast to the dtype that a value has goes": (
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
        "no_op",
    ),
    "a cast that only the author's cast to its dtype reads goes": (
        """
        x: f32[2, 3]
        cast: bf16[2, 3] = cast(x, bf16)
        again: bf16[2, 3] = to.dtype(cast, bf16)
        relu: bf16[2, 3] = relu(again)
        return relu
        """,
        """
        x: f32[2, 3]
        again: bf16[2, 3] = to.dtype(x, bf16)
        relu: bf16[2, 3] = relu(again)
        return relu
        """,
        "author",
    ),
    "widening and back goes": (
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
        "round_trip",
    ),
    "the wide value stays for its other readers": (
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
        "round_trip",
    ),
    "casts round a region without gradients are shared": (
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
        "share",
    ),
    "of two upcasts of a reader the one that others need stays": (
        """
        x: bf16[2, 3]
        y: bf16[2, 3]
        wide: f32[2, 3] = cast(x, f32)
        sin: f32[2, 3] = sin(wide)
        other: f32[2, 3] = cast(y, f32)
        sum_1: f32[2, 3] = add.Tensor(wide, other)
        return sum_1, sin
        """,
        """
        x: bf16[2, 3]
        y: bf16[2, 3]
        wide: f32[2, 3] = cast(x, f32)
        sin: f32[2, 3] = sin(wide)
        sum_1: f32[2, 3] = add.Tensor(wide, y)
        return sum_1, sin
        """,
        "promote",
    ),
}


@pytest.mark.parametrize("what", GOES)
def test_a_rule_fires_where(what: str) -> None:
    before, after, rule = GOES[what]
    assert_rewrites(eliminate, before, after, edits=fired(**{rule: 1}))


# Graphs on which none must.
STAYS = {
    "a cast to another dtype stays": """
    x: bf16[2, 3]
    cast: f16[2, 3] = cast(x, f16)
    relu: f16[2, 3] = relu(cast)
    return relu
    """,
    "a users cast to the dtype that a value has stays": """
    x: bf16[2, 3]
    same: bf16[2, 3] = to.dtype(x, bf16)
    relu: bf16[2, 3] = relu(same)
    return relu
    """,
    "a round trip of a value written later stays for it is a copy": """
    x: bf16[2, 3]
    wide: f32[2, 3] = cast(x, f32)
    back: bf16[2, 3] = cast(wide, bf16)
    add_: bf16[2, 3] = add_.Tensor(x, 1)
    relu: bf16[2, 3] = relu(back)
    return relu
    """,
    "a round trip that is returned stays for an output is no input": """
    x: bf16[2, 3]
    wide: f32[2, 3] = cast(x, f32)
    back: bf16[2, 3] = cast(wide, bf16)
    return back
    """,
    "casts in two grad modes are not shared": """
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
}


@pytest.mark.parametrize("what", STAYS)
def test_no_rule_fires_where(what: str) -> None:
    assert_unchanged(eliminate, STAYS[what])


# round_trip


@pytest.mark.parametrize(
    ("middle", "last", "kinds"),
    [
        ("cast(x, f32)", "to.dtype(wide, bf16)", "the second is the user's"),
        ("to.dtype(x, f32)", "cast(wide, bf16)", "the first is the user's"),
        ("to.dtype(x, f32)", "to.dtype(wide, bf16)", "both are the user's"),
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


# promote

WIDENED = """
    x: bf16[2, 3]
    y: f32[2, 3]
    wide: f32[2, 3] = cast(x, f32)
    sum_1: f32[2, 3] = add.Tensor(wide, y)
    return sum_1
"""


@pytest.mark.parametrize(
    ("call", "narrow"),
    [
        ("add.Tensor(wide, y)", "add.Tensor(x, y)"),
        ("add.Tensor(y, wide)", "add.Tensor(y, x)"),
        ("sub.Tensor(wide, y)", "sub.Tensor(x, y)"),
        ("rsub.Tensor(wide, y)", "rsub.Tensor(x, y)"),
        ("mul.Tensor(wide, y)", "mul.Tensor(x, y)"),
        ("div.Tensor(y, wide)", "div.Tensor(y, x)"),
        ("maximum(wide, y)", "maximum(x, y)"),
        ("minimum(wide, y)", "minimum(x, y)"),
        ("where.self(m, wide, y)", "where.self(m, x, y)"),
        ("cat([wide, y], 0)", "cat([x, y], 0)"),
        ("stack([y, wide], 0)", "stack([y, x], 0)"),
        ("add.Tensor(wide, row)", "add.Tensor(x, row)"),
    ],
)
@pytest.mark.parametrize("low", ["bf16", "f16"])
def test_a_kernel_that_promotes_needs_no_upcast(call: str, narrow: str, low: str) -> None:
    before = f"""
        x: {low}[2, 3]
        y: f32[2, 3]
        row: f32[1, 3]
        m: bool[2, 3]
        wide: f32[2, 3] = cast(x, f32)
        out: f32[2, 3] = {call}
        return out
        """
    gm = parse(before)
    original = copy.deepcopy(gm)
    assert eliminate(gm) == fired(promote=1)
    assert next(line for line in render(gm.graph).splitlines() if line.startswith("out")).endswith(f"= {narrow}")
    assert_same_with_gradients(original, gm)
    assert eliminate(gm) == fired()


def assert_same_with_gradients(before: GraphModule, after: GraphModule) -> None:
    """Check outputs and the gradients of all floating inputs bit for bit, and that fewer casts run in forward."""
    before.recompile()
    after.recompile()
    results = []
    for gm in (before, after):
        inputs = [x.requires_grad_(x.is_floating_point()) for x in random_inputs(gm)]
        (out,) = gm(*inputs)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        read = [x for x in inputs if x.requires_grad]
        gradients = torch.autograd.grad((out * weight).sum(), read, allow_unused=True)
        results.append([out, *(g for g in gradients if g is not None)])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    casts = [step_counts(functools.partial(_loss, gm)).casts for gm in (before, after)]
    assert casts[0] == casts[1] + 1


def _loss(gm: GraphModule) -> torch.Tensor:
    (out,) = gm(*(x.requires_grad_(x.is_floating_point()) for x in random_inputs(gm)))
    loss: torch.Tensor = out.sum()
    return loss


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("cast(x, f32)", "to.dtype(x, f32)"), "the user's cast"),
        (("y: f32[2, 3]", "y: f32[]"), "a scalar does not promote"),
        (("y: f32[2, 3]", "y: bf16[2, 3]"), "nothing promotes"),
        (("add.Tensor(wide, y)", "add.Tensor(wide, wide)"), "read twice"),
        (("add.Tensor(wide, y)", "lerp.Scalar(y, wide, 0.5)"), "the kernel rejects mixed operands"),
        (("add.Tensor(wide, y)", "atan2(wide, y)"), "the gradient would differ"),
        (("    wide", "    first: bf16[2, 3] = mul_.Tensor(x, 2)\n    wide"), "written before"),
        (("    return", "    last: bf16[2, 3] = mul_.Tensor(x, 2)\n    return"), "written later"),
        (("    sum_1", "    last: bf16[2, 3] = mul_.Tensor(x, 2)\n    sum_1"), "written in between"),
        (("    sum_1", "    mode = grad_enabled()\n    off = set_grad(False)\n    sum_1"), "another grad mode"),
        (("    return", "    last: f32[2, 3] = relu_(sum_1)\n    return"), "the result is written"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_an_upcast_that_does_more_than_promote_stays(change: tuple[str, str], why: str) -> None:
    text = WIDENED.replace(*change)
    assert text != WIDENED
    assert_unchanged(eliminate, text)


# dtype_argument


@pytest.mark.parametrize(
    ("call", "narrow"),
    [
        ("sum(wide)", "sum(x, dtype=f32)"),
        ("sum.dim_IntList(wide, [1], True)", "sum.dim_IntList(x, [1], True, dtype=f32)"),
        ("nansum(wide)", "nansum(x, dtype=f32)"),
        ("mean(wide)", "mean(x, dtype=f32)"),
        ("mean.dim(wide, [0])", "mean.dim(x, [0], dtype=f32)"),
    ],
)
@pytest.mark.parametrize("low", ["bf16", "f16"])
def test_a_reduction_takes_the_dtype_instead_of_a_cast(call: str, narrow: str, low: str) -> None:
    gm = parse(f"x: {low}[2, 3]\nwide: f32[2, 3] = cast(x, f32)\nout: f32[2] = {call}\nreturn out")
    original = copy.deepcopy(gm)
    assert eliminate(gm) == fired(dtype_argument=1)
    assert render(gm.graph).splitlines()[-2].endswith(f"= {narrow}")
    assert_same_with_gradients(original, gm)


def test_noise_takes_the_dtype_instead_of_a_cast_and_is_the_same_noise() -> None:
    gm = parse("""
        x: bf16[2, 3]
        wide: f32[2, 3] = cast(x, f32)
        noise: f32[2, 3] = rand_like(wide)
        again: f32[2, 3] = uniform_(noise)
        return again
    """)
    original = copy.deepcopy(gm)
    assert eliminate(gm) == fired(dtype_argument=1)
    outputs = []
    for graph in (original, gm):
        torch.manual_seed(0)
        outputs.extend(graph(torch.randn(2, 3).bfloat16()))
    assert outputs[0].dtype == outputs[1].dtype == torch.float32
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("call", "type_"),
    [
        ("sum(wide, dtype=f64)", "f64[]"),  # the user's own
        ("softmax.int(wide, 1)", "f32[2, 3]"),  # casts inside
        ("cumsum(wide, 1)", "f32[2, 3]"),  # its gradient would be summed in low
        ("linalg_vector_norm(wide)", "f32[]"),  # its gradient would be computed in low
        ("prod(wide)", "f32[]"),  # casts in backward instead
        ("amax(wide, [1])", "f32[2]"),  # has no such argument
    ],
)
def test_another_reduction_keeps_its_cast(call: str, type_: str) -> None:
    text = f"x: bf16[2, 3]\nwide: f32[2, 3] = cast(x, f32)\nout: {type_} = {call}\nreturn out"
    assert_unchanged(eliminate, text)


READ_TWICE = """
    x: bf16[2, 3]
    wide: f32[2, 3] = cast(x, f32)
    sum_1: f32[] = sum(wide)
    mean: f32[] = mean(wide)
    return sum_1, mean
"""


def test_a_cast_that_two_reductions_read_stays_where_gradients_flow() -> None:
    assert_unchanged(eliminate, READ_TWICE.replace("x: bf16[2, 3]", "x: bf16[2, 3] = param"))


def test_without_gradients_each_reader_casts_up_by_itself() -> None:
    gm = parse(READ_TWICE)
    assert eliminate(gm)["dtype_argument"] == 2
    assert not any(map(is_inserted, gm.graph.nodes))
    gm = parse(WIDENED.replace("return sum_1", "return sum_1, wide"))
    assert eliminate(gm)["promote"] == 1
    assert sum(map(is_inserted, gm.graph.nodes)) == 1  # what is returned is still cast


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


REDUCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda y: y.sum(0), lambda y: y.norm(), lambda y: torch.linalg.vector_norm(y, dim=-1), torch.trapz,
    lambda y: y.sum_to_size(1, 6), torch.nn.functional.normalize,
)  # fmt: skip


@pytest.mark.parametrize(
    ("reduce", "policy"), in_turns(REDUCTIONS, ["O1,device=cuda,dtype=fp16", "O2,device=cuda,dtype=fp16"])
)
def test_a_reduction_of_values_that_were_captured_low_takes_the_dtype(
    reduce: Callable[[Tensor], Tensor], policy: str
) -> None:
    def f(self: Two, x: Tensor) -> Any:
        return reduce(self.l(x.half()))

    model = Two(f)
    model.l.requires_grad_(False).half()
    plan = plan_of(model, example(), policy)
    reductions = [d for d in plan.decisions if d.op in ("sum", "linalg_vector_norm")]
    assert [d.colour for d in reductions] == ["float32"]


def test_casts_of_a_buffer_are_not_shared_where_only_those_of_weights_are() -> None:
    text = TWO_LAYERS.replace("param", "buffer")
    for share, casts in (("weights", 2), ("always", 1)):
        gm = parse(text)
        note_origins(gm.graph, gm.get_buffer, origins_of(gm.graph, gm.get_buffer))
        eliminate(gm, share)
        assert sum(is_inserted(n) for n in gm.graph.nodes) == casts


def test_a_layer_called_on_a_transposed_and_on_a_plain_input_casts_its_weights_once() -> None:
    model = Two(lambda self, x: (self.l(self.l(x).transpose(0, 1)).relu(), self.l(x)))
    x = torch.randn(3, 4, 6)
    module = graph_of(model, x)
    casts = [n for n in module.graph.nodes if is_inserted(n)]
    assert sorted(c.args[0].op for c in casts) == ["call_function"] * 2 + ["get_attr"] * 2 + ["placeholder"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    with torch.no_grad():
        for ours, theirs in zip(module(x), expected, strict=True):
            assert torch.equal(ours, theirs.float())
