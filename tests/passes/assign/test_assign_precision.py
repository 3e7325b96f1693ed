"""What decides a node's dtype, in order: casts and pins, the rule, the level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from passes.contract.plan import Decision
from tests.support.exported import graph_of, plan_of, traced_of
from tests.support.zoo import LeNet5

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two linears and whatever the test does between them."""

    def __init__(self, between: Callable[..., Any], inputs: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.between = between
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.between(self, x)


def convert(between: Callable[..., Any], policy: Any = "O1", x: Tensor = X) -> Any:
    return graph_of(Net(between), x, policy)


def view(between: Callable[..., Any], policy: Any = "O1", x: Tensor = X) -> Any:
    """Convert the model itself: only Dynamo records what the author cast, and what Python read of dtypes."""
    return fxamp.convert(Net(between), (x,), policy=policy)


def decided(module: Any, op: str) -> list[Decision]:
    return [d for d in fxamp.plan_of(module).decisions if d.op == op]


def under_autocast(module: nn.Module, x: Tensor = X, dtype: torch.dtype | None = torch.bfloat16) -> Tensor:
    with torch.autocast("cpu", dtype=dtype):
        out: Tensor = module(x)
    return out.float()


def test_every_decision_names_its_reason_its_source_and_its_autocast_dtype() -> None:
    plan = plan_of(Net(lambda m, x: m.second(F.relu(m.first(x)))), (X,))
    assert [d.op for d in plan.decisions] == ["linear", "relu", "linear"]
    assert all(d.reason and d.source and d.autocast_dtype == "bfloat16" for d in plan.decisions)
    assert plan.decisions[1].causes == (plan.decisions[0].key,)


def test_a_path_override_keeps_one_layer_in_fp32() -> None:
    plan = plan_of(LeNet5(), (torch.randn(2, 1, 28, 28),), policy=fxamp.Policy(modules={"fc3": "fp32"}))
    colours = {d.module_path: d.colour for d in plan.decisions if d.op in ("linear", "conv2d")}
    assert colours == {"conv1": "bfloat16", "conv2": "bfloat16", "fc1": "bfloat16", "fc2": "bfloat16", "fc3": "float32"}


def test_a_path_beats_a_type_and_a_type_beats_an_op() -> None:
    policy = fxamp.Policy(modules={"first": "low", nn.Linear: "fp32"}, ops={"linear": "low"})
    module = convert(lambda m, x: m.second(m.first(x)), policy)
    assert [d.colour for d in decided(module, "linear")] == ["bfloat16", "float32"]


def test_an_override_of_a_node_is_that_of_its_key_and_beats_those_of_its_module_and_op() -> None:
    def between(m: Any, x: Tensor) -> Any:
        return m.second(F.relu(m.first(m.first(x))))

    policy = fxamp.Policy("O2", modules={"first": "low"}, ops={"relu": "low", "first/linear#0": "fp32"})
    plan = fxamp.plan_of(convert(between, policy))
    low = dict.fromkeys(["first/linear#1", "/relu#0", "second/linear#0"], "bfloat16")
    assert {d.key: d.colour for d in plan.decisions} == {"first/linear#0": "float32", **low}
    assert fxamp.plan_of(convert(between, str(policy))) == plan


def test_an_op_override_lowers_an_op() -> None:
    policy = fxamp.Policy(device="cuda", dtype="bf16", ops={"softmax": "low"})
    plan = plan_of(Net(lambda m, x: torch.softmax(m.first(x), -1)), (X,), policy=policy)
    assert {d.op: d.colour for d in plan.decisions} == {"linear": "bfloat16", "softmax": "bfloat16"}
    assert {d.op: d.autocast_dtype for d in plan.decisions}["softmax"] == "float32"


@pytest.mark.parametrize("key", ["einsum", "/einsum#0"])
def test_an_override_of_a_composite_op_keeps_it_whole(key: str) -> None:
    net = Net(lambda m, x: torch.einsum("bi,oi->bo", x, m.first.weight))
    assert "bmm" in {d.op for d in plan_of(net, (X,), policy=fxamp.Policy()).decisions}
    plan = plan_of(net, (X,), policy=fxamp.Policy(ops={key: "fp32"}))
    assert [(d.op, d.colour) for d in plan.decisions] == [("einsum", "float32")]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (fxamp.Policy(modules={"frst": "fp32"}), r"modules\.frst.*nearest name is 'first'"),
        (fxamp.Policy(ops={"linaer": "fp32"}), r"ops\.linaer.*nearest name is 'linear'"),
        (fxamp.Policy(ops={"frst/linear#0": "fp32"}), r"ops\.frst/linear#0.*nearest name is 'first/linear#0'"),
        (fxamp.Policy(modules={"fir*": "fp32", "fir*t": "low"}), "equal rank"),
    ],
)
def test_an_override_that_matches_nothing_or_contradicts_another_is_an_error(
    policy: fxamp.Policy, message: str
) -> None:
    with pytest.raises(fxamp.PolicyError, match=message):
        convert(lambda m, x: m.first(x), policy)


@pytest.mark.default_case(low="fp16")
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_the_lowest_number_of_the_dtype_that_a_value_has_is_that_of_the_low_one(low: str) -> None:
    def masked(m: Any, x: Tensor) -> Tensor:
        scores = m.first(x)
        scores = scores.masked_fill(torch.ones(4, 8).tril().bool().logical_not(), torch.finfo(scores.dtype).min)
        return m.second(torch.softmax(scores, -1))

    module = view(masked, f"O1,dtype={low}")
    out = module(X)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, Net(masked)(X), rtol=0.05, atol=0.05)
    fill = decided(module, "masked_fill")[0]
    assert (fill.code, fill.colour) == ("promote", "bfloat16" if low == "bf16" else "float16")  # as read


def test_a_write_through_a_view_reaches_what_the_author_made_low() -> None:
    def write(m: Any, x: Tensor) -> Tensor:
        low = x.bfloat16()
        low[..., 0] = 3  # through a view
        return low

    assert torch.equal(convert(write)(X), Net(write)(X))


@pytest.mark.default_case(level="O2")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_view_whose_bits_are_read_is_as_wide_as_in_the_model(level: str) -> None:
    def read(m: Any, x: Tensor) -> Any:
        view = m.first(x).t()
        return torch.ones(1) * view.element_size(), view.contiguous().view(torch.int32)

    module, model = traced_of(Net(read), X, level), Net(read)
    (size, bits), (expected, others) = module(X), model(X)
    assert torch.equal(size, expected)
    assert bits.shape == others.shape


@pytest.mark.default_case(level="O3")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_low_value_with_a_tiny_bound_that_is_written_stays_the_authors(level: str) -> None:
    def write(m: Any, x: Tensor) -> Tensor:
        bounded = x.clamp(1e-7, 1 - 1e-7)
        bounded.to(torch.bfloat16).mul_(2)  # no copy
        return bounded

    low = X.bfloat16()
    assert torch.equal(convert(write, level, low)(low), Net(write)(low))


def test_a_write_through_a_view_reaches_a_cast_that_is_captured_at_the_first_call() -> None:
    class Writes(nn.Module):
        def forward(self, low: Tensor, wide: Tensor) -> Tensor:
            made = wide.to(low.dtype)
            made.t().add_(1)
            return made

    low = X.bfloat16()
    torch._dynamo.reset()
    got = fxamp.compile(Writes(), backend="eager")(low, X.double())
    assert torch.equal(got.bfloat16(), Writes()(low, X.double()))


def test_a_copy_that_autocast_makes_of_written_storage_is_a_deviation_by_name() -> None:
    def write(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        wide = y.float()  # the same tensor in FP32, a copy under autocast
        y.mul_(2)
        return wide

    module = view(write)
    assert torch.equal(module(X), Net(write)(X))
    assert {d.code for d in fxamp.plan_of(module).deviations} == {"mutated"}


@pytest.mark.default_case(level="O2")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_cast_of_the_author_s_stays_a_copy_where_what_it_casts_is_written(level: str) -> None:
    def write(m: Any, x: Tensor) -> Tensor:
        y = F.log_softmax(x, -1)
        low = y.to(torch.bfloat16)
        y *= 3
        return low

    assert torch.allclose(convert(write, level)(X).float(), F.log_softmax(X, -1), atol=0.05)


@pytest.mark.parametrize("spelling", ["type_as", "to"])
def test_a_cast_that_passes_on_what_is_written_does_not_become_a_copy(spelling: str) -> None:
    def write(m: Any, x: Tensor) -> Tensor:
        same = getattr(x, spelling)(F.mse_loss(x, x + 1))  # a scalar in FP32, which O3 would make low
        return same.add_(1)

    given = X.clone()
    convert(write, "O3")(given)
    assert torch.equal(given, X + 1)


def test_a_cast_to_the_dtype_of_an_item_stays_a_copy_where_that_is_written() -> None:
    def write(m: Any, x: Tensor) -> Tensor:
        copied = x.type_as(x.half().erf()[x.argmax(0)])  # an FP16 value, which O3 with BF16 would compute in FP32
        copied -= copied
        return copied

    given = X.clone()
    fxamp.compile(Net(write), policy="O3,dtype=bf16", backend="eager")(given)
    assert torch.equal(given, X)


@pytest.mark.default_case(level="O3")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_cast_of_what_a_checkpoint_gives_stays_a_copy_where_it_is_written(level: str) -> None:
    def write(m: Any, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda a: m.first(a).tanh() * a, x, use_reentrant=False)
        low = y.to(torch.bfloat16)
        low /= 2
        return y

    model = Net(write)
    got = fxamp.compile(model, policy=f"{level},dtype=bf16", backend="eager")(X)
    assert torch.allclose(got, model(X), atol=0.05)


def test_beside_64_bits_what_autocast_makes_fp32_is_fp32() -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(m.first(x), x.double().sigmoid())

    got = convert(loss)(X)
    assert got.dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(got, Net(loss)(X))


@pytest.mark.default_case(level="O3")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_cast_that_does_nothing_restores_no_dtype_wider_than_fp32(level: str) -> None:
    def twice(m: Any, x: Tensor) -> Tensor:
        narrowed = x.double().to(torch.float32)
        return narrowed.to(narrowed.dtype)

    assert convert(twice, level)(X).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_loss_of_logits_that_are_not_fp32_has_their_dtype(dtype: torch.dtype) -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        return F.cross_entropy(x, x.argmax(-1)).mT

    given = X.to(dtype)
    assert fxamp.convert(Net(loss), (given,), policy="O2,dtype=bf16")(given).dtype == dtype


def test_an_author_s_cast_serves_a_reader_that_was_coloured_low() -> None:
    def twice(m: Any, x: Tensor) -> Any:
        return x.type(torch.bfloat16), (x.abs() + 1).log()

    low, log = convert(twice, "O3")(X)
    assert torch.equal(low, X.bfloat16())
    assert torch.allclose(log, (X.abs() + 1).log(), atol=0.02)


def test_a_norm_that_is_told_a_low_dtype_gives_it_on_cuda_as_under_autocast() -> None:
    plan = plan_of(
        Net(lambda m, x: torch.linalg.vector_norm(x.half(), dtype=torch.float16)),
        (X,),
        policy=fxamp.Policy(device="cuda", dtype="fp16"),
    )
    norm = next(d for d in plan.decisions if d.op == "linalg_vector_norm")
    assert (norm.colour, norm.autocast_dtype, norm.code) == ("float16", "float16", "dtype_argument")


def test_binary_cross_entropy_is_refused_on_cuda_and_allowed_by_an_override() -> None:
    net = Net(lambda m, x: F.binary_cross_entropy(torch.sigmoid(m.first(x)), torch.ones(4, 8)))
    with pytest.raises(fxamp.PolicyError, match="binary_cross_entropy_with_logits"):
        plan_of(net, (X,), policy=fxamp.Policy(device="cuda"))
    allowed = fxamp.Policy(device="cuda", ops={"binary_cross_entropy": "fp32"})
    assert plan_of(net, (X,), policy=allowed).decisions[-1].colour == "float32"


def test_o2_keeps_losses_and_range_sensitive_ops_in_fp32_and_lowers_the_rest() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        h = F.layer_norm(x + m.first(x), (8,))
        return F.mse_loss(m.second(h).exp().sum(-1), torch.ones(256))

    x = X.repeat(64, 1)
    fp16 = {d.op: d.colour for d in plan_of(Net(body), (x,), policy="O2,dtype=fp16").decisions}
    assert fp16 == {
        "linear": "float16", "add": "float16", "layer_norm": "float16",
        "exp": "float32", "sum": "float32", "ones": "float32", "broadcast_tensors": "float32", "mse_loss": "float32",
    }  # fmt: skip
    bf16 = {d.op: d.colour for d in plan_of(Net(body), (x,), policy="O2").decisions}
    assert (bf16["exp"], bf16["mse_loss"]) == ("bfloat16", "float32")


def test_o3_runs_everything_low_that_has_a_low_kernel() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return torch.linalg.inv(m.first(x)[:, :4] + torch.eye(4)).exp().sum(-1)

    colours = {d.op: d.colour for d in plan_of(Net(body), (X,), policy="O3,dtype=fp16").decisions}
    assert colours["exp"] == colours["sum"] == colours["linear"] == "float16"
    assert colours["linalg_inv"] == "float32"


def test_what_is_in_the_other_low_dtype_stays_in_it_at_o3() -> None:
    def body(m: Any, x: Tensor) -> Any:
        wide = x.bfloat16() * 1e30  # which FP16 does not hold
        return (wide + wide.exp().long().sum()).max(-1)[0], m.first(x).exp()

    colours = {d.op: d.colour for d in plan_of(Net(body), (X,), policy="O3,dtype=fp16").decisions}
    assert colours["mul"] == colours["add"] == colours["max"] == "bfloat16"
    assert colours["linear"] == "float16"
    wide, _ = convert(body, "O3,dtype=fp16")(X)
    assert torch.equal(wide, body(Net(body), X)[0])


@pytest.mark.default_case(level="O2")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_what_is_in_the_other_low_dtype_makes_no_op_low(level: str) -> None:
    def body(m: Any, x: Tensor) -> Any:
        return m.first(x).float() / ((x.bfloat16() * 1e30).relu() + m.scale)

    model = Net(body)
    model.scale = nn.Parameter(torch.ones(8))
    module = fxamp.convert(model, (X,), policy=f"{level},dtype=fp16")
    assert decided(module, "add")[0].colour == "float32"
    assert module(X).isfinite().all()


@pytest.mark.parametrize("op", ["i1", "i1e"])
def test_o3_trains_through_an_op_that_has_a_low_kernel_for_the_forward_only(op: str) -> None:
    module = convert(lambda m, x: getattr(torch.special, op)(m.first(x)), "O3")
    module(X).sum().backward()
    assert module.get_submodule("first").weight.grad is not None


@pytest.mark.parametrize("way", ["O1", "O2", "O3"])
def test_every_level_trains(way: str) -> None:
    net = Net(lambda m, x: m.second(F.gelu(F.layer_norm(m.first(x), (8,)))))
    module = fxamp.convert(net, (X,), policy=way)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        loss = F.mse_loss(module(X), torch.zeros(4, 8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


INDEX = torch.tensor([0, 1, 0, 0])
EVERYWHERE = INDEX[:, None].expand(4, 8)
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "index_add": lambda y: torch.zeros(2, 8).index_add(0, INDEX, y),
    "scatter_add": lambda y: y.new_zeros(2, 8).scatter_add(0, EVERYWHERE, y),
    "scatter_reduce": lambda y: torch.zeros(2, 8).scatter_reduce(0, EVERYWHERE, y, "sum"),
    "index_reduce": lambda y: y.new_ones(2, 8).index_reduce(0, INDEX, y, "mean"),
    "scatter": lambda y: y.new_zeros(2, 8).scatter(0, EVERYWHERE, y, reduce="add"),
    "index_put": lambda y: torch.zeros(2, 8).index_put((INDEX,), y, accumulate=True),
    "index_add_": lambda y: y.new_zeros(2, 8).index_add_(0, INDEX, y),
    "scatter_add_": lambda y: torch.zeros_like(y).scatter_add_(0, EVERYWHERE, y),
    "index_put_": lambda y: torch.zeros_like(y).index_put_((INDEX,), y, accumulate=True),
}
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "scatter_reduce": lambda y: y.new_zeros(2, 8).scatter_reduce(0, EVERYWHERE, y, "amax"),
    "scatter": lambda y: y.new_zeros(2, 8).scatter(0, EVERYWHERE, y),
    "index_put": lambda y: y.new_zeros(4, 8).index_put((INDEX.sort()[0],), y),
    "index_copy": lambda y: y.new_zeros(4, 8).index_copy(0, torch.tensor([2, 0, 1, 3]), y),
}


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument")
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("op", SUMS)
def test_at_o2_sums_into_an_accumulator_are_fp32(op: str, dtype: str) -> None:
    def f(m: Net, x: Tensor) -> Any:
        return m.second(SUMS[op](m.first(x)))

    module = convert(f, f"O2,dtype={dtype}")
    assert [d.colour for d in decided(module, op)] == ["float32"]
    assert [d.colour for d in decided(module, "linear")] == [{"fp16": "float16", "bf16": "bfloat16"}[dtype]] * 2
    expected, got = Net(f)(X), module(X)
    assert ((got - expected).norm() / expected.norm()).item() < 0.02


@pytest.mark.parametrize("op", MOVES)
def test_at_o2_writes_that_sum_nothing_stay_low(op: str) -> None:
    module = convert(lambda m, x: m.second(MOVES[op](m.first(x))), "O2,dtype=bf16")
    assert [d.colour for d in decided(module, op)] == ["bfloat16"]


def test_a_sum_into_an_accumulator_that_leaves_fp16_stays_finite_at_o2() -> None:
    def f(m: Net, x: Tensor) -> Any:
        return torch.zeros(1, 8).index_add(0, torch.zeros(4, dtype=torch.long), m.first(x) * 30_000)

    expected, got = Net(f)(X), convert(f, "O2,dtype=fp16")(X)
    assert expected.abs().max() > 65_504
    assert torch.allclose(got, expected, rtol=0.01, atol=60)


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument")
@pytest.mark.parametrize("op", SUMS)
def test_at_o1_sums_into_an_accumulator_are_autocasts(op: str) -> None:
    def f(m: Net, x: Tensor) -> Any:
        return SUMS[op](m.first(x))

    try:
        expected = under_autocast(Net(f))
    except RuntimeError:  # of mixed dtypes
        return
    assert torch.equal(convert(f)(X), expected)


@pytest.mark.default_case(level="O2")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_tensor_made_of_a_tensor_is_a_cast_that_returns_its_operand_where_it_can(level: str) -> None:
    def write(m: Any, x: Tensor) -> Tensor:
        torch.as_tensor(x, dtype=torch.bfloat16).pow_(2)
        return x

    given = X.bfloat16()
    fxamp.compile(Net(write), policy=f"{level},dtype=bf16", backend="eager")(given)
    assert torch.equal(given, X.bfloat16().pow_(2))


def test_a_low_dtype_that_autocast_does_not_make_is_the_authors() -> None:
    def outside(m: Any, x: Tensor) -> Tensor:
        log = F.log_softmax(x, -1, dtype=x.dtype)
        with torch.autocast("cpu", enabled=False):
            return torch.complex(x, log).abs()

    given = X.half()
    got = fxamp.compile(Net(outside), policy="O1,dtype=bf16", backend="eager")(given)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(got, Net(outside)(given))


@pytest.mark.default_case(level="O3")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_without_inputs_a_value_of_64_bits_stays_one(level: str) -> None:
    converted = fxamp.convert(Net(lambda m, x: torch.rand_like(x @ x.t()) + x @ x.t()), policy=f"{level},dtype=bf16")
    assert converted(X.double()).dtype == torch.float64


def test_what_a_product_keeps_for_backward_is_not_what_is_written_after_it() -> None:
    def write(m: Any, x: Tensor) -> Tensor:
        y = F.softplus(x)  # FP32 under autocast, whose product reads a copy; O3 would have it low
        product = m.first(y)
        y *= 0.5
        return product

    convert(write, "O3")(X).sum().backward()


def test_a_cast_that_did_nothing_shares_what_is_written_as_before() -> None:
    def write(m: Any, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x.bfloat16(), dim=-1, dtype=x.dtype)
        same = norm.to(torch.result_type(x, norm))
        norm.fill_(3)
        return same

    assert torch.equal(convert(write, "O2")(X), torch.full(X.shape[:-1], 3.0))


def test_a_cast_to_a_dtype_that_is_read_at_run_time_shares_what_is_written_as_before() -> None:
    def write(m: Any, x: Tensor) -> Tensor:
        half = x.half()
        spread = half.std(0)  # FP16, which O3 with BF16 would compute in FP32
        same = spread.to(torch.result_type(half, x.long()))
        spread.zero_()
        return same

    converted = traced_of(Net(write), X, "O3,dtype=bf16")
    assert torch.equal(converted(X), torch.zeros(X.shape[-1]))


@pytest.mark.default_case(level="O3")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # which torch says once in a process
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_without_inputs_an_op_that_takes_one_dtype_alone_is_given_one(level: str) -> None:
    model = Net(lambda m, x: torch.complex(x, x.relu().half()).abs())
    converted = fxamp.convert(model, policy=f"{level},dtype=bf16")
    assert torch.allclose(converted(X.half()).float(), model(X.half()).float(), atol=2e-3)


def test_a_copy_in_64_bits_does_not_make_what_is_written_fp32() -> None:
    def write(m: Any, x: Tensor) -> Any:
        y = m.first(x) * 0.5
        wide = y.double()
        y[..., 0] = -1.5
        return y, wide

    module = convert(write)
    assert decided(module, "mul")[0].colour == "bfloat16"
    assert not fxamp.plan_of(module).deviations


def test_at_o0_the_models_own_region_of_autocast_is_kept_just_in_time() -> None:
    def region(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.first(x)

    model = Net(region)
    got = fxamp.compile(model, policy="O0", backend="eager")(X)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, model(X))
