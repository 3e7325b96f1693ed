"""What other mixed-precision systems got wrong: each defect as a model that goes right here, by every front end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxamp
from passes.notes import is_inserted
from tests.support.front_ends import (
    BF16,
    F32,
    FP16,
    FRONT_ENDS,
    WARNINGS,
    assert_as_autocast,
    assert_eager,
    at_levels,
    convert,
    decided,
    fresh,
    one,
    under_autocast,
)
from tests.support.helpers import Two, assert_same, assert_untouched, example, fingerprint

pytestmark = [*WARNINGS, pytest.mark.usefixtures("fresh")]
__all__ = ["fresh"]
each_front_end = pytest.mark.parametrize("front_end", FRONT_ENDS)
both_low = pytest.mark.parametrize(("name", "low"), [("bf16", BF16), ("fp16", FP16)], ids=["bf16", "fp16"])


def casts(module: nn.Module) -> list[Any]:
    """Return the casts that fxamp made, in all graphs."""
    return [n for g in fxamp.graphs(module) for n in g.graph.nodes if is_inserted(n)]


def converted(forward: Callable[..., Any], front_end: str, policy: str = "O1", **layers: nn.Module) -> tuple[Any, Any]:
    """Return a model and its conversion, which has been called once."""
    torch.manual_seed(0)
    model = Two(forward, **layers)
    module = convert(model, one(), front_end, policy)
    with torch.no_grad():
        module(*one())
    return model, module


# Torch-TensorRT's rule-based autocast.


@each_front_end
def test_indices_are_not_cast(front_end: str) -> None:
    def lookup(self: Any, x: Tensor) -> Any:
        ids = torch.tensor([[300, 301], [2, 1]])
        rows = F.embedding(ids, self.table.weight)
        return rows.gather(1, ids[:, :, None] % 2), F.one_hot(ids % 5, 5), self.l(x)[ids % 4], ids + 0

    model = Two(lookup, table=nn.Embedding(302, 6))
    for made in at_levels(model, one(), front_end, "O1", "O2", "O3"):
        module = made()
        got = module(*one())
        assert torch.equal(got[3], torch.tensor([[300, 301], [2, 1]]))
        assert (got[1].dtype, got[3].dtype) == (torch.int64, torch.int64)
        for node in casts(module):
            held = node.all_input_nodes[0].meta.get("val")
            assert held is None or held.is_floating_point()


AMINMAX_HAS_A_DERIVATIVE = torch.__version__ >= "2.13"


def many_outputs(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    normed, mean, rstd = torch.native_layer_norm(y, [6], None, None, 1e-5)
    variance, average = torch.var_mean(y, 1)
    ordered, order = torch.sort(y, 1)
    a, b = y.chunk(2, 1)
    first, second = y.unbind(0)[0], y.unbind(0)[1]
    smallest, largest = torch.aminmax(y if AMINMAX_HAS_A_DERIVATIVE else y.detach())
    kth, where = y.kthvalue(2, 1)
    statistics = mean, rstd, variance, average, smallest, largest
    return self.m(normed), statistics, ordered, order, a @ b.mT, first, second, kth, where


@each_front_end
def test_an_op_of_several_outputs_goes_through(front_end: str) -> None:
    torch.manual_seed(0)
    model = Two(many_outputs)
    exact, rounded = at_levels(model, one(), front_end, "O0", "O1")
    assert_eager(exact(), model, one())
    assert_as_autocast(rounded(), model, one())


@each_front_end
def test_a_value_is_cast_once_per_dtype(front_end: str) -> None:
    def fan_out(self: Any, x: Tensor) -> Any:
        y = self.l(x)
        wide = torch.relu(y)
        return self.m(wide), self.l(wide), self.m(x) + wide, wide.abs() * 2

    for made in at_levels(Two(fan_out), one(), front_end, "O1,ops.relu=fp32", "O2,ops.relu=fp32"):
        module = made()
        module(*one())
        sources = [(n.all_input_nodes[0], n.args[1]) for n in casts(module)]
        pairs = [(n.target if n.op == "get_attr" else n, dtype) for n, dtype in sources]
        assert len(pairs) == len(set(pairs)) > 0


# onnxconverter-common.


@each_front_end
def test_a_pair_of_casts_with_two_readers_is_removed(front_end: str) -> None:
    def moved(self: Any, x: Tensor) -> Any:
        y = self.l(x).t().t()
        return self.m(y), self.l(y)

    _, module = converted(moved, front_end, "O1,output_dtype=low")
    sources = [n.all_input_nodes[0].op for n in casts(module)]
    assert "call_function" not in sources
    assert "call_method" not in sources


@each_front_end
def test_a_weight_out_of_range_is_not_clipped(front_end: str) -> None:
    torch.manual_seed(0)
    model = Two(lambda self, x: self.l(x))
    with torch.no_grad():
        model.l.weight[0, 0] = 7e4
    x = example()
    module = convert(model, (x,), front_end, "O1,dtype=fp16")
    with torch.no_grad():
        assert torch.equal(module(x), under_autocast(model, (x,), FP16).float())
    assert model.l.weight[0, 0].item() == 7e4
    torch._dynamo.reset()
    kept = convert(model, (x,), front_end, "O1,dtype=fp16,modules.l=fp32")
    assert torch.equal(kept(x), model(x))


# Intel Neural Compressor.


@each_front_end
@both_low
def test_every_cast_is_to_the_dtype_that_was_asked_for(name: str, low: torch.dtype, front_end: str) -> None:
    _, module = converted(lambda self, x: self.m(F.gelu(self.l(x))).exp(), front_end, f"O1,dtype={name}")
    # Just in time the output is restored behind the last graph, for it leaves that as autocast has it.
    assert {n.args[1] for n in casts(module)} == ({low} if front_end == "jit" else {low, F32})
    assert set(decided(module, "linear")) == {str(low).removeprefix("torch.")}


# torch.autocast.


@each_front_end
def test_the_other_low_dtype_is_no_reason_to_fail_or_to_round_again(front_end: str) -> None:
    def island(self: Any, x: Tensor) -> Any:
        other = self.l(x).bfloat16()
        return other + self.m(x), torch.cat([other.float(), self.m(x)]), other @ other.t()

    model, module = converted(island, front_end, "O1,dtype=fp16")
    got, expected = module(*one()), model(*one())
    assert_same([t.dtype for t in got], [t.dtype for t in expected])
    for ours, eager in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=0.02, atol=0.03)
    matmul = next(d for d in fxamp.plan_of(module).decisions if d.op == "matmul")
    assert (matmul.colour, matmul.code) in {("float32", "user_cast"), ("bfloat16", "user_cast")}


@each_front_end
def test_a_product_in_double_precision_is_left_alone_and_said(front_end: str) -> None:
    model, module = converted(lambda self, x: (self.l(x), x.double() @ self.m.weight.double()), front_end)
    assert torch.equal(module(*one())[1], model(*one())[1])
    decision = next(d for d in fxamp.plan_of(module).decisions if d.op == "matmul")
    assert (decision.colour, decision.code) == ("float64", "float64")


@each_front_end
def test_an_explicit_dtype_wins_at_every_level(front_end: str) -> None:
    def explicit(self: Any, x: Tensor) -> Any:
        y = self.l(x)
        return torch.softmax(y, -1, dtype=F32).sum(-1, dtype=torch.float64), y.cumsum(1, dtype=F32)

    torch.manual_seed(0)
    model = Two(explicit)
    for level, made in zip(("O1", "O2", "O3"), at_levels(model, one(), front_end, "O1", "O2", "O3"), strict=True):
        module = made()
        got = module(*one())
        assert [t.dtype for t in got] == [torch.float64, F32]
        assert set(decided(module, "softmax")) == {"float32"}
        assert (got[0] - 1).abs().max() < (1e-6 if level != "O3" else 0.01)  # O3 may round what a sum is given


# Inductor and XLA.


@each_front_end
def test_a_round_trip_that_the_author_wrote_rounds(front_end: str) -> None:
    def rounded(self: Any, x: Tensor) -> Any:
        return x.to(BF16).float(), x.half().float(), self.l(x)

    for made in at_levels(Two(rounded), one(), front_end, "O1", "O2", "O3"):
        got = made()(*one())
        for ours, low in zip(got[:2], (BF16, FP16), strict=True):
            assert torch.equal(ours, example().to(low).float())
            assert not torch.equal(ours, example())


# TorchScript's autocast pass.


def helper(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16):
        return layer(x)


@each_front_end
def test_functions_and_graph_modules_inside_are_converted(front_end: str) -> None:
    inner = fx.symbolic_trace(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    model, module = converted(lambda self, x: self.m(self.inner(x)), front_end, inner=inner)
    assert decided(module, "linear") == ["bfloat16", "bfloat16"]
    assert torch.equal(module(*one()), under_autocast(model, one()).float())
    region = Two(lambda self, x: self.m(helper(self.l, x).float()))
    if front_end == "fx":
        with pytest.raises(fxamp.CaptureError, match=r"a torch\.autocast region at .*test_defects\.py"):
            convert(region, one(), front_end)
    else:
        assert torch.equal(convert(region, one(), front_end)(*one()), under_autocast(region, one()).float())


# AMP tools that convert in place, and Apex.


@each_front_end
def test_the_model_stays_as_it_was_and_its_outputs_keep_their_dtype(front_end: str) -> None:
    model = Two(lambda self, x: {"y": self.m(self.l(x)), "half": self.l(x).half()})
    before = fingerprint(model)
    module = convert(model, one(), front_end, "O2")
    if front_end != "jit":  # Dynamo leaves marks of its own on a module
        assert_untouched(model, before)
    got = module(*one())
    for (path, kind, _, values), (_, now, _, after) in zip(before[0], fingerprint(model)[0], strict=True):
        assert kind is now, path
        assert [(i, v) for i, v, *_ in values] == [(i, v) for i, v, *_ in after], path  # objects, and their versions
    assert (got["y"].dtype, got["half"].dtype) == (F32, FP16)


@each_front_end
def test_an_op_in_place_follows_its_target(front_end: str) -> None:
    def write(self: Any, x: Tensor) -> Any:
        y = self.l(x) * 1
        view = y[1:]
        y.exp_()
        y.pow_(2)
        y.mul_(self.m(x)).div_(x.abs() + 1)
        return y, view

    torch.manual_seed(0)
    model = Two(write).requires_grad_(False)
    for made in at_levels(model, one(), front_end, "O1", "O2"):
        module = made()
        got, view = module(*one())
        torch.testing.assert_close(got, model(*one())[0], rtol=0.05, atol=0.05)
        assert torch.equal(got[1:], view)
        written = {d.op: d.colour for d in fxamp.plan_of(module).decisions if d.op.endswith("_")}
        assert len(set(written.values())) == 1
        assert set(written) == {"exp_", "pow_", "mul_", "div_"}


def test_under_cudas_lists_an_op_in_place_keeps_the_dtype_of_its_target() -> None:
    def write(self: Any, x: Tensor) -> Any:
        y = self.l(x)
        y.exp_()
        return y.log_softmax(-1)

    plan = fxamp.plan(Two(write).requires_grad_(False), one(), policy=fxamp.Policy(device="cuda"))
    assert [(d.op, d.colour) for d in plan.decisions] == [
        ("linear", "float16"),
        ("exp_", "float16"),
        ("log_softmax", "float32"),
    ]


# TensorFlow's grappler pass.


@each_front_end
@pytest.mark.parametrize("choice", ["keep", "fp32", "error"])
def test_an_op_without_a_rule_is_treated_as_the_policy_says(choice: str, front_end: str) -> None:
    with torch.library._scoped_library("fxamp_defects", "FRAGMENT") as library:
        library.define("unlisted(Tensor x) -> Tensor")
        library.impl("unlisted", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("fxamp_defects::unlisted", lambda x: torch.empty_like(x), lib=library)
        model = Two(lambda self, x: self.m(torch.ops.fxamp_defects.unlisted(self.l(x)))).requires_grad_(False)
        policy = f"O1,unknown_ops={choice}"
        if choice == "error":
            with pytest.raises(Exception, match=r"fxamp_defects::unlisted .*fxamp\.register_rule"):
                convert(model, one(), front_end, policy)(*one())
            return
        module = convert(model, one(), front_end, policy)
        torch.testing.assert_close(module(*one()), model(*one()), rtol=0.02, atol=0.02)
        decision = next(d for d in fxamp.plan_of(module).decisions if "unlisted" in d.op)
        assert decision.colour == "float32"
        assert decision.code == {"keep": "keep", "fp32": "unknown_op"}[choice]


# Kernels that take some dtypes beside some others, which fake ones do not tell.


def layer_norm_of_fp32(self: Any, x: Tensor) -> Any:
    return F.layer_norm(x, (6,), self.l(x)[0]), F.layer_norm(x, (6,), self.m(x)[0], self.m.bias)


def group_norm_of_fp32(self: Any, x: Tensor) -> Any:
    return F.group_norm(x, 2, self.l(x)[0])


def batch_norm_of_fp32(self: Any, x: Tensor) -> Any:
    return F.batch_norm(x, x.mean(0), x.var(0), self.l(x)[0], self.l(x)[1])


def instance_norm_of_fp32(self: Any, x: Tensor) -> Any:
    return F.instance_norm(x[None], None, None, self.l(x)[0, :4], self.l(x)[1, :4])


def norms_with_weights_of_two_dtypes(self: Any, x: Tensor) -> Any:
    y, weight = self.l(x), self.m(x)[0]
    mean, var = x.mean(0), x.var(0)
    batch = F.batch_norm(y, mean, var, weight, self.m.bias) + F.batch_norm(y, mean, var, self.m.bias, weight)
    return F.layer_norm(y, (6,), weight, self.m.bias) + F.layer_norm(y, (6,), self.m.bias, weight) + batch


def norms_as_autocast_runs_them(self: Any, x: Tensor) -> Any:
    y, weight, bias = self.l(x), self.m(x)[0], self.m(x)[1]
    return F.layer_norm(y, (6,), weight, bias) + F.group_norm(y, 2, self.m.bias, self.l.bias)


NORMS = (layer_norm_of_fp32, group_norm_of_fp32, batch_norm_of_fp32, instance_norm_of_fp32,
         norms_with_weights_of_two_dtypes, norms_as_autocast_runs_them)  # fmt: skip


def assert_at_all_levels(model: nn.Module, args: Any, front_end: str, name: str, low: torch.dtype) -> None:
    """Compare O0 with eager, and every other level with torch.autocast."""
    exact, *rounded = at_levels(
        model, args, front_end, *(f"{level},dtype={name}" for level in ("O0", "O1", "O2", "O3"))
    )
    assert_eager(exact(), model, args)
    for make in rounded:
        assert_as_autocast(make(), model, args, low)


@both_low
@each_front_end
@pytest.mark.parametrize("norm", NORMS, ids=lambda f: f.__name__)
def test_a_norm_whose_weights_are_computed(norm: Any, front_end: str, name: str, low: torch.dtype) -> None:
    torch.manual_seed(0)
    model, (x,) = Two(norm), one()
    levels = ("O0", *(f"{level},dtype={name}" for level in ("O1", "O2", "O3")))
    exact, rounded, *further = at_levels(model, (x,), front_end, *levels)
    assert_eager(exact(), model, (x,))
    assert_as_autocast(rounded(), model, (x,), low)
    for module in further:
        with torch.no_grad():
            torch.testing.assert_close(module()(x), model(x), atol=0.1, rtol=0.05)


@both_low
@each_front_end
def test_bags_whose_weights_are_computed(front_end: str, name: str, low: torch.dtype) -> None:
    def bags(self: Any, x: Tensor) -> Any:
        return self.e(torch.arange(24).view(4, 6) % 10, per_sample_weights=self.l(x))

    torch.manual_seed(0)
    model, args = Two(bags, e=nn.EmbeddingBag(10, 6, mode="sum")), one()
    assert_at_all_levels(model, args, front_end, name, low)


@both_low
@pytest.mark.parametrize("front_end", ["export", "jit"])
def test_a_region_of_the_other_low_dtype_reads_what_is_low(front_end: str, name: str, low: torch.dtype) -> None:
    other = BF16 if low == FP16 else FP16

    def forward(self: Any, x: Tensor) -> Any:
        y = self.l(x)
        with torch.autocast("cpu", dtype=other):
            inside = self.m(y)
            both = self.l(inside + y)
        return inside, both, torch.cat([inside, y])

    torch.manual_seed(0)
    model, args = Two(forward), one()
    levels = ("O0", *(f"{level},dtype={name}" for level in ("O1", "O2", "O3", "O1,modules.m=fp32")))
    exact, *rounded = at_levels(model, args, front_end, *levels)
    assert_eager(exact(), model, args)
    for make in rounded:
        module = make()
        with torch.no_grad():
            got, wanted = module(*args), model(*args)
        assert [t.dtype for t in got] == [other, other, F32]
        torch.testing.assert_close([t.float() for t in got], [t.float() for t in wanted], atol=0.05, rtol=0.05)
        if ".m=" not in str(fxamp.plan_of(module).policy):
            assert decided(module, "linear") == [str(d).removeprefix("torch.") for d in (low, other, other)]


# Writes to a tensor that is given.


def out_of_a_selection(self: Any, x: Tensor) -> Any:
    y = self.l(x).detach()
    largest, first = torch.empty(4), torch.empty(4, dtype=torch.long)
    torch.max(y, 1, out=(largest, first))
    ordered, order = torch.empty(4, 6), torch.empty(4, 6, dtype=torch.long)
    torch.sort(y, 1, out=(ordered, order))
    two, which = torch.empty(4, 2), torch.empty(4, 2, dtype=torch.long)
    torch.topk(y, 2, out=(two, which))
    second, place = torch.empty(4), torch.empty(4, dtype=torch.long)
    torch.kthvalue(y, 2, out=(second, place))
    return largest, first, ordered, order, two, which, second, place


def out_of_a_move(self: Any, x: Tensor) -> Any:
    y = self.l(x).detach()
    a, b, c, d = torch.empty(2, 6), torch.empty(2, 6), torch.empty(4, 6), torch.empty(4)
    torch.index_select(y, 0, torch.tensor([1, 2]), out=a)
    torch.gather(y, 0, torch.zeros(2, 6, dtype=torch.long), out=b)
    torch.clamp(y, 0.0, 1.0, out=c)
    torch.linalg.svdvals(y, out=d)
    return a, b, c, d


def out_of_what_is_cast(self: Any, x: Tensor) -> Any:
    y = self.l(x).detach()
    a, b, c, d = torch.empty(8, 6), torch.empty(4, 6), torch.empty(6), torch.empty(4, 6)
    torch.cat([y, y], out=a)
    torch.exp(y, out=b)
    torch.sum(y, 0, out=c)
    torch.add(y, y, alpha=3, out=d)
    return a, b, c, d


@both_low
@each_front_end
@pytest.mark.parametrize("writes", [out_of_a_selection, out_of_a_move, out_of_what_is_cast], ids=lambda f: f.__name__)
def test_out_of_another_dtype_than_the_operand(writes: Any, front_end: str, name: str, low: torch.dtype) -> None:
    torch.manual_seed(0)
    model, args = Two(writes), one()
    levels = [f"{level},dtype={name}" for level in ("O0", "O1", "O2", "O3")]
    exact, rounded, *further = at_levels(model, args, front_end, *levels)
    assert_eager(exact(), model, args)
    module = rounded()
    if writes is out_of_what_is_cast:
        assert_same(module(*args), under_autocast(model, args, low))
    for got in (module(*args), *(make()(*args) for make in further)):
        torch.testing.assert_close(got, model(*args), atol=0.05, rtol=0.05)


@both_low
@each_front_end
def test_lists_that_are_written(front_end: str, name: str, low: torch.dtype) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y, z = self.l(x).detach(), x.clone()
        torch._foreach_add_([y, z], 1.0)
        return y, z

    model, args = Two(forward), one()
    assert_at_all_levels(model, args, front_end, name, low)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")  # autocast makes such
@both_low
@each_front_end
def test_complex_numbers_made_of_low_ones(front_end: str, name: str, low: torch.dtype) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return (1j * self.l(x)).imag, (1j * self.m(x) + 2).abs()

    torch.manual_seed(0)
    model, args = Two(forward), one()
    assert_at_all_levels(model, args, front_end, name, low)


@each_front_end
@pytest.mark.parametrize("policy", ["O1", "O2", "O3", "O1,dtype=fp16"])
def test_random_fills_draw_what_the_model_drew(front_end: str, policy: str) -> None:
    def noise(self: Any, x: Tensor) -> Any:
        y = self.l(x)
        whole = y.new_empty(4, 6)
        # Dynamo leaves `random_` to Python, which draws under autocast what autocast draws.
        whole = whole.fill_(3) if front_end == "jit" else whole.random_()
        made = torch.empty_like(y).normal_(), whole, y.new_empty(4, 6).uniform_()
        return (*made, y.new_empty(4, 6).log_normal_(), y.new_empty(4, 6).cauchy_(), y.new_empty(4, 6).bernoulli_(0.5))

    model, args = Two(noise), one()
    exact, rounded = at_levels(model, args, front_end, "O0", policy)
    assert_eager(exact(), model, args)
    module = rounded()
    torch.manual_seed(0)
    got, state = module(*args), torch.get_rng_state()
    torch.manual_seed(0)
    wanted = model(*args)
    assert torch.equal(state, torch.get_rng_state())
    assert_same(got[:2], wanted[:2])
    torch.testing.assert_close(got, wanted, rtol=0.01, atol=0.01)


@each_front_end
@pytest.mark.parametrize("policy", ["O1", "O2", "O3", "O3,dtype=fp16"])
def test_integers_times_frequencies_are_positions(front_end: str, policy: str) -> None:
    def rotary(self: Any, x: Tensor) -> Any:
        angles = (torch.arange(4)[:, None] + 3000) * torch.tensor([1.0, 0.5, 0.25])
        return self.l(x)[:, :3] * angles.sin()

    torch.manual_seed(0)
    model, args = Two(rotary), one()
    exact, rounded = at_levels(model, args, front_end, "O0", policy)
    assert_eager(exact(), model, args)
    with torch.no_grad():
        torch.testing.assert_close(rounded()(*args), model(*args), rtol=0.02, atol=0.02)
