"""The last line of defence finds what no preflight can see, and leaves no trace."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from fxamp.capture.states import capture
from fxamp.trust import check
from fxamp.trust.check import check_faithful
from passes.contract.errors import NotFaithfulError
from tests.support.helpers import (
    FRONT_ENDS,
    Two,
    assert_is_eager,
    assert_untouched,
    convert_fixed,
    example,
    fingerprint,
    o0,
)

OWN = random.Random(0)


def draws_by_its_own(self: Any, x: Tensor) -> Tensor:
    return self.l(x) * OWN.random()


def own_generator(self: Any, x: Tensor) -> Tensor:
    return self.l(x) * torch.rand(6, generator=torch.Generator().manual_seed(random.randrange(2**40)))


class ByType(Two):
    """Branches on a type in a place that symbolic tracing cannot see."""

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) * scale(x)


def scale(x: Any) -> float:
    return 2.0 if type(x) is Tensor else 1.0


class Counts(Two):
    """Counts its calls, and may warm up by that."""

    def __init__(self, warms_up: bool) -> None:
        super().__init__(None)
        self.calls, self.warms_up = 0, warms_up

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.l(x) * (min(self.calls, 10) / 10 if self.warms_up else 1.0)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_count_of_calls_on_which_a_result_depends_is_found(front_end: str) -> None:
    counts = Counts(warms_up=False)
    assert_is_eager(o0(counts, front_end=front_end), counts)
    with pytest.raises(fxamp.CaptureError, match=r"output 0 differs.* forward\(\) sets 'calls'"):
        o0(Counts(warms_up=True), front_end=front_end)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_draw_by_a_generator_of_its_own_is_found(front_end: str) -> None:
    model = Two(draws_by_its_own)
    before, state = fingerprint(model), random.getstate()
    with pytest.raises(NotFaithfulError, match=rf"draws numbers from '{re.escape(__name__)}\.OWN'.*{front_end}"):
        o0(model, front_end=front_end)
    assert_untouched(model, before)
    assert random.getstate() == state


def test_a_branch_on_the_type_is_found_with_inputs_and_unseen_without() -> None:
    with pytest.raises(fxamp.CaptureError, match="output 0 differs"):
        o0(ByType(), front_end="fx")
    convert_fixed(ByType(), policy="O0")
    o0(ByType(), front_end="fx", check=False)


def _double_gradient(graph: torch.fx.Graph) -> None:
    output: Any = graph.output_node()
    (value,) = output.args[0]
    with graph.inserting_before(output):
        detached = graph.call_function(torch.ops.aten.detach.default, (value,))
        twice = graph.call_function(torch.ops.aten.mul.Tensor, (value, 2.0))
        same = graph.call_function(torch.ops.aten.sub.Tensor, (twice, detached))
    output.args = ((same,),)


def _no_gradient(graph: torch.fx.Graph) -> None:
    output: Any = graph.output_node()
    (value,) = output.args[0]
    with graph.inserting_before(output):
        detached = graph.call_function(torch.ops.aten.detach.default, (value,))
    output.args = ((detached,),)


def _swap(graph: torch.fx.Graph) -> None:
    node = next(n for n in graph.nodes if n.target is torch.ops.aten.relu.default)
    node.target = torch.ops.aten.abs.default


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_double_gradient, r"the gradient of parameter '0\.weight' differs"),
        (_no_gradient, r"the gradient of parameter '0\.weight' is lost"),
        (_swap, "output 0 differs by"),
    ],
)
def test_a_lossy_graph_is_refused_by_what_it_loses(spoil: Callable[[torch.fx.Graph], None], said: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    captured = capture(model, (example(),)).graphs[0]
    check_faithful(captured, (example(),), {})
    spoil(captured.graph)
    with pytest.raises(fxamp.CaptureError, match=said):
        check_faithful(captured, (example(),), {})


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_random_state_buffers_gradients_and_inputs_are_as_before(front_end: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout())
    model(example()).sum().backward()
    before = fingerprint(model)
    x = example().requires_grad_()
    o0(model, (x,), None, front_end)
    assert_untouched(model, before)
    assert x.grad is None


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_model_that_writes_to_its_input_is_checked_on_copies(front_end: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.l(x.mul_(2))

    x = example()
    o0(Two(forward), (x,), None, front_end)
    assert torch.equal(x, example())


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_parameter_that_forward_writes_is_restored(front_end: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 6, max_norm=0.1), nn.Linear(6, 6))
    before = fingerprint(model)
    converted = o0(model, (torch.tensor([[0, 1], [3, 3]]),), None, front_end)
    assert_untouched(model, before)
    converted(torch.tensor([[0, 2], [4, 4]]))
    assert model[0].weight[0].norm().item() <= 0.11  # type: ignore[index]


class Counter(Two):
    """Writes to its input and to a buffer, and returns neither."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        self.count.add_(1)
        x.mul_(2)
        return y


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize(("lost", "said"), [("add_", "in 'count'"), ("mul_", "in input 0")])
def test_a_write_that_the_graph_lacks_is_found(front_end: str, lost: str, said: str) -> None:
    captured = capture(Counter(), (example(),), front_end=front_end).graphs[0]
    check_faithful(captured, (example(),), {})
    for node in list(captured.graph.nodes):
        if str(node.target).removeprefix("aten.").startswith(lost):
            node.replace_all_uses_with(node.args[0])
            captured.graph.erase_node(node)
    with pytest.raises(NotFaithfulError, match=f"leaves other values {said}"):
        check_faithful(captured, (example(),), {})


def test_nan_and_integer_outputs_compare_equal() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.l(x) / 0 * 0, x.argmax(1), x > 0

    o0(Two(forward))


def test_without_gradients_outputs_alone_are_compared() -> None:
    with torch.no_grad():
        o0(Two())
    o0(Two().requires_grad_(False))


def test_a_model_whose_own_backward_fails_is_converted_for_inference() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = torch.exp(self.l(x))
        z = y * 2
        y.add_(1)
        return z + y

    model = Two(forward)
    converted = o0(model)
    with torch.no_grad():
        assert torch.equal(converted(example()), model(example()))


def test_sparse_gradients_are_compared() -> None:
    o0(nn.Sequential(nn.Embedding(5, 6, sparse=True)), (torch.tensor([0, 3, 3]),))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_on_the_meta_device_shapes_are_compared_and_the_plan_says_so(front_end: str) -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), torch.empty(4, 6)
    converted = o0(model, (x,), None, front_end)
    assert converted(x).is_meta
    assert [note for note in converted.plan.notes if "meta device" in note]
    captured = capture(model, (x,), front_end=front_end).graphs[0]
    output: Any = captured.graph.output_node()
    with captured.graph.inserting_before(output):
        output.args = ((captured.graph.call_function(torch.mean, output.args[0]),),)
    with pytest.raises(NotFaithfulError, match="output 0 differs by shape"):
        check_faithful(captured, (x,), {})


def test_a_graph_whose_backward_fails_is_refused() -> None:
    def noisy(self: Any, x: Tensor) -> Tensor:
        y = self.l(x)
        return self.m(y) + torch.randint_like(y, 5)  # which the exporter gives a gradient that it has no formula for

    with pytest.raises(NotFaithfulError, match="the graph's backward raises an error, and the model's does not"):
        o0(Two(noisy))


def test_an_output_that_is_no_tensor_is_compared() -> None:
    with pytest.raises(NotFaithfulError, match=r"output 1 is 'Proxy.*' instead of 'torch.float32'"):
        o0(Two(lambda self, x: (self.l(x), f"{x.dtype}")), front_end="fx")


def test_an_op_that_only_its_fake_kernel_runs_is_found_at_conversion_and_named() -> None:
    def sloped(self: Any, x: Tensor) -> Tensor:
        return F.rrelu(self.l(x), training=True, inplace=True)  # which autocast cannot run in FP16 on a CPU either

    with pytest.raises(
        fxamp.VerificationError, match=r"converted module does not: rrelu_ in module ''.*ops\.NAME=fp32"
    ):
        fxamp.convert(Two(sloped), (example(),), policy="O1,dtype=fp16")
    fxamp.convert(Two(sloped), (example(),), policy="O1,dtype=fp16,modules.l=fp32")
    fxamp.convert(Two(sloped), (example(),), policy="O1,dtype=fp16", check=False)


def test_a_transform_inside_forward_is_captured() -> None:
    model = Two(lambda self, x: self.m(torch.vmap(self.l)(x)))
    assert_is_eager(o0(model), model)
    converted = convert_fixed(model, (example(),))
    assert (converted(example()) - model(example())).norm() <= 0.02 * model(example()).norm()


def test_a_gradient_that_is_zero_but_for_rounding_is_compared_with_the_others() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    noisy: Any = [torch.full((6,), 1e-7), torch.ones(6)]
    other: Any = [torch.full((6,), 2e-7), torch.ones(6)]
    check._compare_gradients("", model, noisy, other)
    for wrong in ([torch.full((6,), 1e-5), torch.ones(6)], [torch.full((6,), 1e-7), torch.full((6,), 1.00001)]):
        with pytest.raises(NotFaithfulError, match="the gradient of parameter"):
            check._compare_gradients("", model, noisy, wrong)
