"""The cut moves casts only where no value changes at O1, and counts what it saves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import networkx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from fxamp.measure.costs import Penalties
from fxamp.view.view import runner_of
from passes import ByteCosts
from passes.assign.place import choose_storage as placing
from passes.contract.errors import VerificationError
from passes.graph.notes import is_inserted, note
from tests.passes.assign.test_assign_precision import Net, decided, under_autocast
from tests.support import front_ends
from tests.support.baseline import UnderAutocast
from tests.support.exported import graph_of, plan_of, traced_of
from tests.support.front_ends import FRONT_ENDS
from tests.support.graphs import compile_plain, parse
from tests.support.helpers import Layers, Two, example, in_turns

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
CUDA = fxamp.Policy(device="cuda", dtype="fp16")


def convert(between: Any, policy: Any = "O1", x: Tensor = X) -> Any:
    return graph_of(Net(between), x, policy)


def casts(module: Any, of: str = "") -> list[str]:
    """Return "producer -> dtype" of the inserted casts of values that are no parameters."""
    made = [n for n in module.graph.nodes if is_inserted(n) and n.args[0].op != "get_attr"]
    return [f"{n.args[0].name} -> {str(n.args[1])[6:]}" for n in made if n.args[0].name.startswith(of)]


def test_an_upcast_is_shared_over_a_view() -> None:
    def loss(m: Any, x: Tensor) -> Any:
        return (y := m.first(x)), F.cross_entropy(y.view(-1, 4), torch.zeros(8, dtype=torch.long))

    module = convert(loss, "O1,share_casts=always")
    assert [c.split(" ")[-1] for c in casts(module)] == ["bfloat16", "float32"]
    assert casts(module)[1] == "linear -> float32"
    assert decided(module, "view")[0].code == "cut"


def test_a_downcast_stands_at_the_smallest_tensor_of_a_chain() -> None:
    module = convert(lambda m, x: m.second(F.layer_norm(x, (8,))[:2].contiguous()))
    assert casts(module) == ["slice_1 -> bfloat16", "linear -> float32"]


def test_a_value_that_an_fp32_reader_sees_unrounded_is_not_stored_low() -> None:
    plan = plan_of(Net(lambda m, x: m.first(torch.softmax(F.relu(x * m.second.bias), -1))), X, CUDA)
    assert {d.op: d.colour for d in plan.decisions}["relu"] == "float32"


def test_a_view_of_gamma_is_not_stored_low() -> None:
    plan = plan_of(Net(lambda m, x: F.layer_norm(m.first(x), (8,), m.second.bias.view(-1))), X, CUDA)
    assert {d.op: d.colour for d in plan.decisions}["view"] == "float32"


@pytest.mark.parametrize("use", ["compare", "argmax"])
def test_a_value_that_is_compared_is_not_stored_low(use: str) -> None:
    def both(m: Any, x: Tensor) -> Any:
        y = (x * m.second.bias).neg()
        z = m.first(y)
        return z * (y > 0.5) if use == "compare" else (z, y.argmax())

    module = convert(both)
    assert decided(module, "neg")[0].colour == "float32"
    got, expected = module(X), Net(both)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = expected(X)
    for a, b in zip([got] if use == "compare" else got, [wanted] if use == "compare" else wanted, strict=True):
        assert torch.equal(a.float(), b.float())


def test_a_gathered_row_is_cast_after_the_gather() -> None:
    def rows(self: Any, index: Tensor) -> Tensor:
        return self.out(self.table[index])

    index = torch.randint(0, 3, (64,), generator=torch.Generator().manual_seed(0))
    model: Any = Layers(rows, table=nn.Parameter(torch.randn(50, 8)), out=nn.Linear(8, 8))
    double = copy.deepcopy(model).double()
    module = graph_of(model, index)
    assert "index" in casts(module)[0]
    module(index).square().sum().backward()
    got = model.table.grad
    double(index).square().sum().backward()
    assert got is not None
    assert double.table.grad is not None
    assert (got - double.table.grad).norm() / double.table.grad.norm() < 0.01


def test_o2_stores_low_what_pays_and_keeps_what_is_out_of_range() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        mask = torch.full((4, 8), -1e9).triu()
        h = x + m.first(x)
        return m.second(torch.softmax(h + mask, -1) + m.first(h))

    x = X.expand(64, 4, 8)  # more elements than what autocast's FP32 is kept for
    colours = [d.colour for d in decided(convert(body, "O2,dtype=fp16", x), "add")]
    assert colours == ["float16", "float32", "float16"]
    assert torch.isfinite(convert(body, "O2,dtype=fp16", x)(x)).all()


@pytest.mark.default_case(level="O2")
@pytest.mark.filterwarnings("ignore:FP16 gradients")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_stay_near_the_truth(level: str) -> None:
    def block(m: Any, x: Tensor) -> Tensor:
        h = x + m.second(F.gelu(m.first(F.layer_norm(x, (8,)))))
        return torch.cat([h.view(2, 2, 8).transpose(0, 1).reshape(4, 8), h], 1).softmax(-1)

    def gradient(module: Any, x: Tensor, parameters: nn.Module) -> Tensor:
        parameters.zero_grad()
        (module(x) * torch.linspace(0, 1, 16)).sum().backward()
        return torch.cat([p.grad.double().flatten() for p in parameters.parameters() if p.grad is not None])

    net, double = Net(block), Net(block).double()
    truth = gradient(double, X.double(), double)
    got = gradient(graph_of(net, X, level), X, net)

    reference = gradient(UnderAutocast(net, torch.bfloat16), X, net)
    bound = {"O1": 1.1, "O2": 1.5}[level]
    assert (got - truth).norm() <= bound * (reference - truth).norm()


def test_the_authors_own_upcast_serves_the_output_too() -> None:
    gm = parse(
        """
        x: f32[4, 8]
        w: f32[8, 8] = param
        y: f32[4, 8] = linear(x, w)
        wide: f32[4, 8] = to.dtype(y, f32)
        loss: f32[4, 8] = softmax.int(wide, -1)
        return y, loss
        """
    )
    note(next(n for n in gm.graph.nodes if n.name == "wide"), cast="literal")
    policy = fxamp.Policy("O1", dtype="bf16", device="cpu", share_casts="always")
    compile_plain(gm, policy)
    assert casts(gm) == ["x -> bfloat16"]
    assert [n.name for n in gm.graph.output_node().all_input_nodes] == ["wide", "loss"]


def test_an_upcast_that_the_author_writes_to_does_not() -> None:
    def loss(m: Any, x: Tensor) -> Any:
        y = m.first(x)
        wide = y.to(torch.float64)
        wide.add_(1)
        return y.double(), wide

    plain, written = convert(loss)(X)
    assert torch.equal(written, plain + 1)


def test_what_the_author_upcast_is_read_in_fp32() -> None:
    module = fxamp.convert(Net(lambda m, x: m.second(torch.softmax(m.first(x).float(), -1))), (X,), policy="O2")
    assert decided(module, "softmax")[0].colour == "float32"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_o2_runs_the_tail_of_a_cross_entropy_in_fp32_after_one_cast(reduction: str) -> None:
    target = torch.tensor([1, 0, -100, 3])

    def loss(m: Any, x: Tensor) -> Tensor:
        return F.cross_entropy(m.first(x), target, reduction=reduction)

    module = convert(loss, "O2")
    ops = [d.op for d in fxamp.plan_of(module).decisions]
    assert "cross_entropy_loss" not in ops
    assert {"log_softmax", "nll_loss"} < set(ops)
    torch.testing.assert_close(module(X), Net(loss)(X), rtol=0.02, atol=0.02)
    assert casts(module, "linear") == ["linear -> float32"]
    assert casts(module, "log_softmax") == []


@pytest.mark.parametrize(("dim", "colour"), [(-1, "float32"), (0, "bfloat16")])
def test_o2_lowers_a_log_softmax_only_where_its_errors_scatter(dim: int, colour: str) -> None:
    module = convert(lambda m, x: m.second(F.log_softmax(m.first(x), dim)), "O2")
    assert decided(module, "log_softmax")[0].colour == colour


@pytest.mark.parametrize("way", FRONT_ENDS)
def test_a_number_that_is_rounded_with_a_value_keeps_it_low(way: str) -> None:
    def f(self: Two, x: Tensor) -> Any:
        a = self.l(x)
        filled = torch.where(a > 0, a, 0.1), torch.where(a > 0, a, 0.5), torch.where(a > 0, torch.tensor(0.1), a)
        return *filled, torch.cat([a, x])  # which wants it in FP32

    model, x = Two(f).eval(), example()
    module = front_ends.convert(model, (x,), way)
    with torch.no_grad():
        got = module(x)
        with torch.autocast("cpu"):
            expected = model(x)
    equal = [torch.equal(a.float(), b.float()) for a, b in zip(expected, got, strict=True)]
    assert equal == [True] * 4


READERS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda h: torch.softmax((h + h.sum(1, True) * 0.1).float(), -1).to((h + h.sum(1, True) * 0.1).dtype),
    lambda h: (h.sort(-1).values.float() * 2).to(h.sort(-1).values.dtype) + h,
    lambda h: (torch.linalg.cross(h[:, :3], h[:, 3:]).float() * 2).to(h.dtype),
)


@pytest.mark.parametrize(("between", "policy"), in_turns(READERS, ["O2,dtype=fp16", "O3,dtype=fp16", "O2,dtype=bf16"]))
def test_a_dtype_that_is_read_of_a_moved_value_is_the_one_that_was_decided(
    between: Callable[[Tensor], Tensor], policy: str
) -> None:
    def f(self: Two, x: Tensor) -> Any:
        h = self.l(x)
        h = h + h.sum(1, True) * 0.1
        return torch.softmax(between(h).float(), -1).to(h.dtype), h

    module, model = traced_of(Two(f), example(), policy), Two(f)
    model.load_state_dict(module.state_dict(), strict=False)
    for ours, theirs in zip(module(example()), model(example()), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.allclose(ours, theirs, atol=0.05)


class Encoder(nn.Module):
    """A residual block and a norm, of which the result leaves the graph."""

    def __init__(self, last: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm, self.last = nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32), last

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.norm(h + self.second(h)))


@pytest.mark.parametrize(
    "last", [lambda y: y, lambda y: y.transpose(0, 1), lambda y: y.view(-1, 2, 16).permute(1, 0, 2)]
)
def test_what_leaves_the_graph_is_cast_before_its_last_op_and_not_rounded_behind_it(last: Any) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    module = graph_of(Encoder(last), x, "O2")
    assert [d.colour for d in decided(module, "layer_norm")] == ["float32"]
    rounding = graph_of(Encoder(last), x, "O2,ops.layer_norm=low")
    assert fxamp.plan_of(module).casts == fxamp.plan_of(rounding).casts
    expected = Encoder(last)(x)
    error, rounded = ((m(x) - expected).norm() / expected.norm() for m in (module, rounding))
    assert error < 0.9 * rounded


def test_an_output_that_a_matrix_product_reads_too_is_not_rounded_where_that_takes_no_cast_more() -> None:
    class Both(Encoder):
        def forward(self, x: Tensor) -> Any:
            y = self.norm(self.first(x))
            return y, self.second(y)

    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    module, rounding = (graph_of(Both(), x, policy) for policy in ("O2", "O2,ops.layer_norm=low"))
    assert [d.colour for d in decided(module, "layer_norm")] == ["float32"]
    assert [d.colour for d in decided(rounding, "layer_norm")] == ["bfloat16"]
    assert fxamp.plan_of(module).casts == fxamp.plan_of(rounding).casts


@pytest.mark.parametrize("batch", [2, 64])
def test_a_placement_does_not_depend_on_the_batch_of_the_example(batch: int) -> None:
    def scaled(self: Any, x: Tensor) -> Tensor:  # a value of fixed size beside one that grows with the batch
        return (self.l(x).unsqueeze(1) * self.m(self.m.weight)).prod(-1)

    model = Layers(scaled, l=nn.Linear(256, 256), m=nn.Linear(256, 256))
    view = fxamp.convert(model, (torch.randn(batch, 256),), policy="O2,dtype=bf16")
    assert [d.colour for d in fxamp.plan_of(view).decisions if d.op == "mul"] == ["float32"]


def test_a_graph_that_allows_no_placement_is_a_bug_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def unbounded(problem: Any) -> Any:
        raise networkx.NetworkXUnbounded

    monkeypatch.setattr(placing, "solve", unbounded)
    with pytest.raises(VerificationError, match=r"conflicting constraints\. This is a bug in fxamp"):
        convert(lambda m, x: m.first(x).relu(), "O2")


def test_an_upcast_is_free_beside_an_fp32_tensor_and_not_beside_a_number() -> None:
    def f(self: Two, x: Tensor) -> Any:
        y = self.l(x).detach()
        return (y + 300) - (y + 300).mean(-1, keepdim=True)

    model = Two(f).requires_grad_(False)
    module = graph_of(model, example(), "O2,dtype=fp16")
    assert {d.colour for d in fxamp.plan_of(module).decisions if d.op == "add"} == {"float16"}


@pytest.mark.parametrize("seed", range(3))
def test_a_slice_is_cast_after_it_is_taken_so_that_a_product_reads_what_autocasts_reads(seed: int) -> None:
    torch.manual_seed(seed)
    model = Net(lambda m, x: m.first(x[..., :8]) + m.first(x[..., 8:]))
    x = torch.randn(2, 16, 16)
    module = graph_of(model, x, "O1,dtype=bf16")
    with torch.no_grad():
        assert torch.equal(module(x), under_autocast(model, x).float())
    assert [c for c in casts(module) if c.startswith("slice")] == ["slice_1 -> bfloat16", "slice_2 -> bfloat16"]


def test_penalties_move_a_value_to_fp32_where_they_outweigh_its_casts() -> None:
    def between(m: Any, x: Tensor) -> Any:
        return m.second(torch.tanh(m.first(x)))

    def colours(values: dict[str, float], casts: dict[tuple[str, str], float]) -> dict[str, str]:
        view = fxamp.convert(Net(between), policy="O2,dtype=bf16")
        runner_of(view).graphs.costs = Penalties(ByteCosts("cpu"), values, casts)
        view(X)
        return {d.key: d.colour for d in fxamp.plan_of(view).decisions}

    key = "/tanh#0"
    plain = colours({}, {})
    assert plain[key] == "bfloat16"
    assert colours({key: 1.0}, {}) == plain
    assert colours({key: 1e9}, {})[key] == "float32"
    assert colours({key: 1e9}, {("second/linear#0", key): 2e9})[key] == "bfloat16"  # its cast would cost more


def test_a_parameter_that_two_nodes_read_is_cast_once_and_so_is_it_counted() -> None:
    gm = parse(
        """
        x: f32[200, 8]
        w: f32[8, 8] = buffer
        gain: f32[200, 8] = buffer
        y: f32[200, 8] = linear(x, w)
        a: f32[200, 8] = mul.Tensor(y, gain)
        b: f32[200, 8] = mul.Tensor(y, gain)
        both: f32[200, 8] = sub.Tensor(a, b)
        z: f32[200, 8] = linear(both, w)
        return z
        """
    )
    traced = copy.deepcopy(gm)  # as symbolic tracing reads an attribute: by a node at each place
    gain, b = (next(n for n in traced.graph.nodes if n.name == name) for name in ("gain", "b"))
    with traced.graph.inserting_before(b):
        b.args = (b.args[0], traced.graph.get_attr("gain"))
    b.args[1].meta.update(gain.meta)
    policy = fxamp.Policy("O2", dtype="bf16", device="cpu")
    once, twice = (compile_plain(m, policy) for m in (gm, traced))
    assert {d.colour for d in once.decisions} == {"bfloat16"}
    assert (twice.decisions, twice.casts) == (once.decisions, once.casts)
