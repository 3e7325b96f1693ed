"""A model's own autograd functions stay whole in an exported graph, with their backward, or are refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.capture.functions import call
from tests.support.helpers import Two, assert_is_eager, assert_same, example, o0


class TimesHundred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 100, None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class ProductAndSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x @ weight.t(), x.sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        assert x.dtype == weight.dtype == g.dtype == torch.float32
        return 3 * (g @ weight) + h, g.t() @ x


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return (g * 2).clamp(-100, 100)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Any) -> Tensor:
        ctx.factor = 2.0 if by is None else 3.0
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.factor, None


class AddOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class MinusMaximum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x -= x.amax(-1, keepdim=True)  # without mark_dirty, as in the sparsemax of many libraries
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


class OfAList(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: list[Tensor]) -> Tensor:
        return x[0] * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None


def one_output(self: Any, x: Tensor) -> Tensor:
    return self.m(TimesHundred.apply(self.l(x), 0.5))  # type: ignore[no-untyped-call]


times_hundred = TimesHundred.apply  # as PyTorch's documentation advises
clipped = Clipped.apply


def bound_early(self: Any, x: Tensor) -> Tensor:
    return self.m(times_hundred(self.l(x), 0.5))  # type: ignore[no-untyped-call]


def a_view(self: Any, x: Tensor) -> Tensor:
    return self.m(Reversed.apply(self.l(x)))  # type: ignore[no-untyped-call]


def several_outputs(self: Any, x: Tensor) -> Tensor:
    product, total = ProductAndSum.apply(self.l(x), self.m.weight)  # type: ignore[no-untyped-call]
    return product * total


def called_twice(self: Any, x: Tensor) -> Tensor:
    return TimesHundred.apply(self.m(TimesHundred.apply(self.l(x), 0.5)), 2.0)  # type: ignore[no-untyped-call]


def without_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = TimesHundred.apply(x, 0.5)  # type: ignore[no-untyped-call]
    return self.m(self.l(y))


EARLY = [bound_early] if isinstance(vars(torch.autograd.Function)["apply"], classmethod) else []  # else refused
KEPT = [one_output, *EARLY, a_view, several_outputs, called_twice, without_gradient]


@pytest.mark.parametrize("forward", KEPT)
def test_a_function_keeps_its_backward(forward: Callable[..., Tensor]) -> None:
    model = Two(forward)
    converted = o0(model)
    assert_is_eager(converted, model)
    assert any(n.target is call for n in converted.graph.nodes)


@pytest.mark.parametrize("forward", [one_output, *EARLY, a_view, called_twice, without_gradient])
def test_at_o1_a_function_runs_as_under_autocast(forward: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Two(forward), example()
    converted = fxamp.convert(model, (x,), policy="O1,dtype=bf16", capture="export")
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    expected.sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for module in (converted, copy.deepcopy(converted)):
        assert torch.equal(module(x), expected.float())
    converted(x).sum().backward()
    assert_same([p.grad for p in model.parameters() if p.grad is not None], gradients)
    assert "as_autocast" in {d.kind for d in converted.plan.decisions}
    assert not converted.plan.deviations


@pytest.mark.skipif(not EARLY, reason="this torch has an apply of C, which is refused if it is bound early")
def test_a_function_bound_early_keeps_a_backward_that_the_example_does_not_show() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.m(clipped(self.l(x)))  # type: ignore[no-untyped-call]

    torch.manual_seed(0)
    model, x = Two(forward), example()
    gradients = []
    for module in (model, o0(model)):
        (module(x).sum() * 1e6).backward()
        gradients.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert_same(*gradients)


def test_what_a_function_computes_inside_is_what_autocast_computes_there() -> None:
    torch.manual_seed(0)
    model, x = Two(several_outputs).eval(), example()
    converted = fxamp.convert(model, (x,), policy="O1,dtype=bf16", capture="export", check=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(converted(x), model(x).float())


def test_beyond_o1_a_function_sees_the_original_dtypes_and_the_plan_says_so() -> None:
    model, x = Two(several_outputs), example()
    converted = fxamp.convert(model, (x,), policy="O2,dtype=bf16", capture="export")
    converted(x).sum().backward()
    (kept,) = [d for d in converted.plan.decisions if d.code == "keep"]
    assert kept.colour == "float32"


def test_other_batch_sizes_are_taken() -> None:
    model = Two(one_output)
    x = torch.cat([example(), example()])
    assert torch.equal(o0(model, dynamic_shapes="auto")(x), model(x))


def test_the_converted_module_can_be_copied_and_saved() -> None:
    model, x, file = Two(one_output), example(), io.BytesIO()
    converted = o0(model)
    torch.save(converted, file)
    file.seek(0)
    for module in (copy.deepcopy(converted), torch.load(file, weights_only=False)):
        assert torch.equal(module(x), model(x))


def test_a_function_that_writes_to_its_input_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.m(AddOne.apply(self.l(x)))  # type: ignore[no-untyped-call]

    with pytest.raises(fxamp.CaptureError, match=r"'AddOne'.*backward"):
        o0(Two(forward))


def test_a_function_that_takes_its_tensors_in_a_list_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.m(OfAList.apply([self.l(x)]))  # type: ignore[no-untyped-call]

    with pytest.raises(fxamp.CaptureError, match=r"'OfAList'.*backward"):
        o0(Two(forward))


class Half:
    def __repr__(self) -> str:
        return "0.5"


PRINTED = [2, 2.0, float("inf"), 1j, "a", None, ..., slice(1, None), range(3), {"a": (1, [2])}, {1}, torch.float32]
NOT_PRINTED = [
    nn.ModuleList([nn.Linear(2, 2)]), object(), Half(), lambda: 1, torch.Generator(), {"a": nn.Linear(2, 2)},
    [(Half(),)], np.float64(2), np.ones(2), nn.Linear, torch.relu,
]  # fmt: skip


def test_arguments_that_a_graph_can_print_are_kept() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.l(x)
        for argument in PRINTED:
            y = Scaled.apply(y, argument)  # type: ignore[no-untyped-call]
        return self.m(y)

    model = Two(forward)
    converted = o0(model)
    assert_is_eager(converted, model)
    assert [n.args[2] for n in converted.graph.nodes if n.target is call] == PRINTED


@pytest.mark.parametrize("argument", NOT_PRINTED, ids=lambda a: type(a).__name__)
def test_a_function_with_an_argument_that_a_graph_cannot_print_is_refused(argument: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.m(Scaled.apply(self.l(x), argument))  # type: ignore[no-untyped-call]

    with pytest.raises(fxamp.CaptureError, match=r"'Scaled'.*backward"):
        o0(Two(forward))


def written_inside(self: Any, x: Tensor) -> Tensor:
    y = self.l(x) * 2
    z = MinusMaximum.apply(y)  # type: ignore[no-untyped-call]
    return self.m(y) + z


@pytest.mark.parametrize("low", [False, True])
def test_what_a_function_writes_to_its_input_is_read_afterwards(low: bool) -> None:
    torch.manual_seed(0)
    model, x = Two(written_inside), example()
    converted = fxamp.convert(model, (x,), policy="O1,dtype=bf16" if low else "O0", capture="export")
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        assert torch.equal(converted(x), model(x).float())


def test_beyond_o1_a_function_writes_to_no_copy_of_its_input() -> None:
    converted = fxamp.convert(Two(written_inside), (example(),), policy="O2,dtype=bf16", capture="export")
    (written,) = [n.args[1] for n in converted.graph.nodes if n.target is call]
    assert written.target is torch.ops.aten.mul.Tensor
