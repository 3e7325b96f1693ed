"""Wrong values, refusals and crashes at the edges of the compiler: each of these tests failed before it was mended."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

import fxamp
from passes import compile_graph
from passes.contract.policy import Policy
from passes.ops.rules import _custom
from tests.support.front_ends import FRESH, convert
from tests.support.graphs import attribute
from tests.support.helpers import Two, example

pytestmark = FRESH


def doubles(h: Tensor) -> Tensor:
    return h.mul_(2)


def halves(h: Tensor) -> None:
    h.div_(2)


torch.fx.wrap("doubles")
allowed = torch.compiler.allow_in_graph(lambda h: h.mul_(2))
allowed_view = torch.compiler.allow_in_graph(lambda h: h.view(-1).mul_(2))


def writes_wrapped(self: Any, x: Tensor) -> Tensor:
    h = self.l(x)
    doubles(h)
    return self.m(h)


def writes_allowed(self: Any, x: Tensor) -> Tensor:
    h = self.l(x)
    allowed(h)
    return self.m(h)


def writes_through_a_view(self: Any, x: Tensor) -> Tensor:
    h = self.l(x)
    allowed_view(h[:2])
    return self.m(h)


def writes_to_a_sum(self: Any, x: Tensor) -> Tensor:
    h = self.l(x) + x
    allowed(h)
    return self.m(h)


WRITES = {
    "fx.wrap": (writes_wrapped, "traced"),
    "allow_in_graph": (writes_allowed, "view"),
    "through a view": (writes_through_a_view, "view"),
    "to an FP32 value": (writes_to_a_sum, "view"),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("how", WRITES)
def test_what_an_opaque_call_writes_is_not_lost(how: str, level: str) -> None:
    forward, way = WRITES[how]
    torch.manual_seed(0)
    model = Two(forward).requires_grad_(False)
    given = torch.fx.symbolic_trace(model) if way == "traced" else model
    module = fxamp.convert(given, (example(),), policy=f"{level},dtype=bf16", check=False)
    got, exact = module(example()), model(example())
    assert (got - exact).norm() / exact.norm() < 0.02


def scaled_by_an_integer(self: Any, x: Tensor) -> Tensor:
    return torch.softmax(self.l(x) * 100000, -1)


def filled_with_an_integer(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    return torch.softmax(y.masked_fill(y > 0, -1000000000), -1)


@pytest.mark.parametrize("way", ["view", "graph"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("forward", [scaled_by_an_integer, filled_with_an_integer], ids=lambda f: f.__name__)
def test_an_integer_out_of_range_keeps_its_node_fp32(forward: Callable[..., Any], level: str, way: str) -> None:
    module = convert(Two(forward), (example(),), way, f"{level},dtype=fp16")
    assert module(example()).isfinite().all()
    op = "mul" if forward is scaled_by_an_integer else "masked_fill"
    assert {d.colour for d in fxamp.plan_of(module).decisions if d.op == op} == {"float32"}


@pytest.fixture
def fp32_only() -> Iterator[Any]:
    """Give an op whose kernel takes FP32 alone, though its rule says that it follows its operand."""

    @library.custom_op("edges::increment", mutates_args=())
    def increment(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError(f"the kernel takes float32 only, not {x.dtype}")
        return x + 1

    increment.register_fake(torch.empty_like)
    increment.register_autograd(lambda ctx, grad: grad)
    fxamp.register_rule("edges::increment", "follow")
    yield torch.ops.edges.increment
    _custom.pop("edges::increment", None)


@pytest.mark.parametrize("way", ["view", "graph"])
def test_an_op_without_a_low_kernel_is_not_lowered_by_the_cut(way: str, fp32_only: Any) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.m(fp32_only(self.l(x) + x)), self.l(F.rrelu(self.m(x) + x, training=True))

    policy = "O2,dtype=fp16"
    module = convert(Two(forward), (example(64),), way, policy)
    module(example(64))
    low = {d.op: d.colour for d in fxamp.plan_of(module).decisions}
    assert low["edges::increment"] == low["rrelu"] == "float32"


@pytest.mark.parametrize("way", ["view", "graph"])
@pytest.mark.parametrize("key", ["ops.cdist", "ops.linalg_inv", "modules.inner"])
def test_an_override_to_low_of_an_op_without_a_low_kernel_is_refused_by_name(key: str, way: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.l(x)
        return torch.cdist(y, y) + torch.linalg.inv(torch.eye(4) + 0.01 * (y @ y.transpose(0, 1)))

    def whole(self: Any, x: Tensor) -> Any:
        return self.inner(x)

    op = "linalg_inv" if "inv" in key else "cdist"
    model = Two(whole, inner=Two(forward))
    with pytest.raises(fxamp.PolicyError, match=rf"^{key}=low: {op} .*no kernel for torch.bfloat16 on this cpu"):
        convert(model, (example(),), way, f"O1,dtype=bf16,{key}=low")(example())


class Written(nn.Module):
    """A block whose sum is FP32 under autocast, saved by a layer and then written."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.a(x) + x
        z = self.b(y)
        y.add_(1)
        return y, z


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Written(), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y, z = checkpoint(self.block, x, use_reentrant=False)
        return self.last(y + z)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_checkpointed_block_may_be_written_in_place_at_every_level(level: str) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(32, 64)
    exact = model(x)
    y = fxamp.compile(model, policy=f"{level},dtype=bf16", backend="eager")(x)
    y.sum().backward()
    assert (y - exact).norm() / exact.norm() < 0.02


def test_a_body_that_several_calls_share_is_compiled_once() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.b(torch.relu(self.a(x)))) + x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(6))
            self.run = torch.compiler.nested_compile_region(lambda block, x: block(x))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = self.run(block, x)
            return x

    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 8)
    module = fxamp.compile(model, policy="O1,dtype=bf16", backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    assert torch.equal(module(x), expected.float())
    plan = fxamp.plan_of(module)
    assert plan.casts <= plan.inserted_casts
    assert not [d for d in plan.decisions if d.op == "to"]  # casts of fxamp's are not listed as the author's


def test_a_split_in_two_and_a_split_in_three_are_told_apart() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = self.l(x).chunk(2, -1)
        q, k, v = self.m(torch.cat([a * b.sigmoid(), a], -1)).chunk(3, -1)
        return torch.einsum("bi,bi,bi->b", q, k, v)

    model = Two(forward)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(example())
    module = fxamp.compile(model, policy="O1,dtype=bf16", backend="eager")
    assert torch.equal(module(example()), expected.float())
    assert not fxamp.plan_of(module).deviations


@pytest.mark.parametrize("way", ["convert", "compile"])
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "constant"])
def test_gradients_through_padding_are_summed_as_under_autocast(mode: str, way: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.second(F.pad(self.first(x), (3, 2, 1, 2), mode=mode))

    torch.manual_seed(0)
    first, x = nn.Conv2d(1, 4, 3, padding=1), torch.randn(3, 1, 10, 8)
    model = Two(forward, first=first, second=nn.Conv2d(4, 4, 3))

    def gradient(run: Callable[..., Tensor]) -> Tensor:
        model.zero_grad()
        output = run(x).float()
        (output * torch.linspace(0.5, 1.5, output.numel()).view(output.shape)).sum().backward()
        assert first.weight.grad is not None
        return first.weight.grad.clone()

    def under_autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    if way == "compile":
        module: Any = fxamp.compile(model, policy="O1,dtype=bf16", backend="eager")
    else:
        module = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    assert torch.equal(gradient(module), gradient(under_autocast))


@pytest.mark.parametrize(("low", "stored"), [("bf16", "bfloat16"), ("fp16", "float32")])
def test_a_move_is_stored_low_only_where_its_gradient_was_measured_to_be_the_same(low: str, stored: str) -> None:
    """In FP16 rounding reaches zero, where `abs` has another gradient."""

    def with_norm(self: Any, x: Tensor) -> Tensor:
        return self.m(torch.abs(F.layer_norm(self.l(x), (6,)).float()))

    plan = fxamp.plan(Two(with_norm), (example(),), policy=f"O1,dtype={low}")
    assert [d.colour for d in plan.decisions if d.op == "abs"] == [stored]


@pytest.mark.parametrize("share", ["weights", "never"])
def test_a_weight_that_einsum_and_a_layer_read_has_the_gradient_of_autocast(share: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.einsum("bi,ij,bj->b", x, self.l.weight, self.l(x))

    torch.manual_seed(0)
    model, x = Two(forward), torch.randn(16, 6)

    def gradient(run: Callable[..., Tensor]) -> Tensor:
        model.zero_grad()
        run(x).float().square().sum().backward()
        assert model.l.weight.grad is not None
        return model.l.weight.grad.clone()

    def under_autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    module = fxamp.convert(model, (x,), policy=f"O1,dtype=bf16,share_casts={share}")
    assert torch.equal(gradient(module), gradient(under_autocast))


def exported(model: nn.Module, x: Tensor) -> torch.fx.GraphModule:
    module: Any = torch.export.export(model, (x,)).module()
    for guard in [n for n in module.graph.nodes if n.op == "call_module"]:
        module.graph.erase_node(guard)
    return torch.fx.GraphModule(module, module.graph)


def by_compile_graph(model: nn.Module, x: Tensor, policy: str) -> None:
    gm, chosen = exported(model, x), replace(Policy.parse(policy), device="cpu")
    compile_graph(gm.graph, chosen, functools.partial(attribute, gm))


DOORS: dict[str, Callable[[nn.Module, Tensor, str], Any]] = {
    "a module": lambda model, x, policy: fxamp.convert(model, (x,), policy=policy),
    "a GraphModule": lambda model, x, policy: fxamp.convert(exported(model, x), (x,), policy=policy),
    "compile": lambda model, x, policy: fxamp.compile(model, policy=policy, backend="eager")(x),
    "torch.compile": lambda model, x, policy: torch.compile(
        model, backend="fxamp", options={"policy": policy, "backend": "eager"}
    )(x),
    "compile_graph": by_compile_graph,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("key", ["ops.cdist", "modules.inner"])
def test_an_override_to_low_without_a_low_kernel_is_refused_by_every_way_in(key: str, door: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.l(x)
        return torch.cdist(y, y)

    def whole(self: Any, x: Tensor) -> Any:
        return self.inner(x)

    torch._dynamo.reset()
    says = rf"{key}=low: cdist .*no kernel for torch.bfloat16 on this cpu"
    with pytest.raises((fxamp.PolicyError, BackendCompilerFailed), match=says):  # torch wraps what a backend raises
        DOORS[door](Two(whole, inner=Two(forward)), example(), f"O1,dtype=bf16,{key}=low")
