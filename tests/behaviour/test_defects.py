"""Wrong values, refusals and crashes at the edges of the compiler: each of these tests failed before it was mended."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

import fxamp
from passes.ops.rules import _custom
from tests.support.doors import DOORS
from tests.support.front_ends import FRESH, assert_trains_as_autocast, captured, convert, each_capture, each_front_end
from tests.support.helpers import Layers, Two, example, in_turns

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


@pytest.mark.parametrize(("how", "level"), in_turns(WRITES, ["O1", "O2", "O3"]))
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


@pytest.mark.default_case(level="O2", front_end="graph")
@each_front_end
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("forward", [scaled_by_an_integer, filled_with_an_integer], ids=lambda f: f.__name__)
def test_an_integer_out_of_range_keeps_its_node_fp32(forward: Callable[..., Any], level: str, front_end: str) -> None:
    module = convert(Two(forward), (example(),), front_end, f"{level},dtype=fp16")
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


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_an_op_without_a_low_kernel_is_not_lowered_by_the_cut(front_end: str, fp32_only: Any) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.m(fp32_only(self.l(x) + x)), self.l(F.rrelu(self.m(x) + x, training=True))

    policy = "O2,dtype=fp16"
    module = convert(Two(forward), (example(64),), front_end, policy)
    module(example(64))
    low = {d.op: d.colour for d in fxamp.plan_of(module).decisions}
    assert low["edges::increment"] == low["rrelu"] == "float32"


def written(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Give a sum that is FP32 under autocast, saved by a layer and then written."""
    y = self.a(x) + x
    z = self.b(y)
    y.add_(1)
    return y, z


def checkpointed(self: Any, x: Tensor) -> Tensor:
    y, z = checkpoint(self.block, x, use_reentrant=False)
    return self.last(y + z)


@pytest.mark.default_case(level="O2")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_checkpointed_block_may_be_written_in_place_at_every_level(level: str) -> None:
    torch.manual_seed(0)
    block = Layers(written, a=nn.Linear(64, 64), b=nn.Linear(64, 64))
    model, x = Layers(checkpointed, block=block, last=nn.Linear(64, 64)), torch.randn(32, 64)
    exact = model(x)
    y = fxamp.compile(model, policy=f"{level},dtype=bf16", backend="eager")(x)
    y.sum().backward()
    assert (y - exact).norm() / exact.norm() < 0.02


def test_a_body_that_several_calls_share_is_compiled_once() -> None:
    def block(self: Any, x: Tensor) -> Tensor:
        return torch.relu(self.b(torch.relu(self.a(x)))) + x

    def net(self: Any, x: Tensor) -> Tensor:
        for one in self.blocks:
            x = self.run(one, x)
        return x

    torch.manual_seed(0)
    blocks = nn.ModuleList(Layers(block, a=nn.Linear(8, 8), b=nn.Linear(8, 8)) for _ in range(6))
    run = torch.compiler.nested_compile_region(lambda block, x: block(x))
    model, x = Layers(net, blocks=blocks, run=run), torch.randn(4, 8)
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


@pytest.mark.default_case(capture="ahead")
@each_capture
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "constant"])
def test_gradients_through_padding_are_summed_as_under_autocast(mode: str, capture: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.second(F.pad(self.first(x), (3, 2, 1, 2), mode=mode))

    torch.manual_seed(0)
    model = Two(forward, first=nn.Conv2d(1, 4, 3, padding=1), second=nn.Conv2d(4, 4, 3))
    x = torch.randn(3, 1, 10, 8)
    assert_trains_as_autocast(captured(model, (x,), capture), model, x)


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

    module = fxamp.convert(model, (x,), policy=f"O1,dtype=bf16,share_casts={share}")
    assert_trains_as_autocast(module, model, x)


WAYS_IN = DOORS | {
    "torch.compile": lambda model, args, policy: torch.compile(
        model, backend="fxamp", options={"policy": policy, "backend": "eager"}
    )
}
KEYS = {"ops.cdist": "cdist", "ops.linalg_inv": "linalg_inv", "modules.inner": "cdist"}


@pytest.mark.parametrize(("key", "door"), list(zip(itertools.cycle(KEYS), WAYS_IN, strict=False)))
def test_an_override_to_low_of_an_op_without_a_low_kernel_is_refused_by_every_way_in(key: str, door: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.l(x)
        return torch.cdist(y, y) + torch.linalg.inv(torch.eye(4) + 0.01 * (y @ y.transpose(0, 1)))

    def whole(self: Any, x: Tensor) -> Any:
        return self.inner(x)

    says = rf"{key}=low: {KEYS[key]} .*no kernel for torch.bfloat16 on this cpu"
    with pytest.raises((fxamp.PolicyError, BackendCompilerFailed), match=says):  # torch wraps what a backend raises
        WAYS_IN[door](Two(whole, inner=Two(forward)), (example(),), f"O1,dtype=bf16,{key}=low")(example())
