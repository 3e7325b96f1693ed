"""What capture takes and gives: every way of calling, containers, and modules of other kinds."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from passes._torch import pytree
from reports.zoo import LeNet5
from tests.support.helpers import (
    FRONT_ENDS,
    Two,
    assert_is_eager,
    assert_same,
    example,
    o0,
)

both = pytest.mark.parametrize("front_end", FRONT_ENDS)
Point = namedtuple("Point", "a b")


def plain(self: Any, x: Tensor) -> Tensor:
    return self.m(self.l(x))


def optional(self: Any, x: Tensor, y: Tensor | None = None, *, z: Tensor | None = None) -> Tensor:
    out = self.l(x)
    out = out if y is None else out + y
    return out if z is None else out * z


def variadic(self: Any, *xs: Tensor, **more: Tensor) -> Tensor:
    return self.l(xs[0]) + xs[1] * more["b"]


def nested(self: Any, batch: dict[str, Any]) -> dict[str, Any]:
    return {"a": self.l(batch["p"]), "b": [batch["q"][0], None, 3]}


def with_constants(self: Any, x: Tensor, flag: bool = False, times: int = 2) -> Tensor:
    return self.l(x) * times if flag else self.l(x) + times


def in_training_alone(self: Any, x: Tensor) -> Tensor:
    x.add_(1)
    if self.training:
        y = self.l(x)
    return y


# Ways to call.


def test_the_example_is_as_it_was_where_one_state_of_the_model_rejects_it() -> None:
    x = example()
    o0(Two(in_training_alone).train(), (x,))
    assert torch.equal(x, example())


@both
def test_positional_and_keyword_calls_are_the_same(front_end: str) -> None:
    model, x = Two(optional), example()
    converted = o0(model, (x, x * 2), {"z": x * 3}, front_end)
    assert_is_eager(converted, model, x, x + 1, z=x)
    assert_is_eager(converted, model, z=x, y=x + 1, x=x)
    assert_is_eager(converted, model, x, z=x + 2, y=x)


@both
def test_examples_may_be_a_lone_tensor_or_keywords_alone(front_end: str) -> None:
    model, x = Two(), example()
    assert_is_eager(o0(model, x, None, front_end), model, x)
    assert_is_eager(o0(model, None, {"x": x}, front_end), model, x)


@both
def test_one_tensor_given_twice_is_two_inputs(front_end: str) -> None:
    model, x = Two(optional), example()
    assert_is_eager(o0(model, (x, x), None, front_end), model, x, x + 1)


@both
def test_variadic_arguments(front_end: str) -> None:
    model, x = Two(variadic), example()
    converted = o0(model, (x, x), {"b": x, "a": x}, front_end)
    assert_is_eager(converted, model, x, x * 2, a=x, b=x + 1)
    with pytest.raises(fxamp.CaptureError, match=r"input 'more' has another structure.*\{\} instead of \{'b'"):
        converted(x, x)


@both
def test_nested_containers_in_any_order_of_keys(front_end: str) -> None:
    model, x = Two(nested), example()
    converted = o0(model, ({"p": x, "q": (x,)},), None, front_end)
    assert_is_eager(converted, model, {"p": x + 1, "q": (x * 2,)})
    assert_same(converted({"q": (x * 2,), "p": x}), model({"q": (x * 2,), "p": x}))
    with pytest.raises(fxamp.CaptureError, match=r"input 'batch' has another structure.*'r'"):
        converted({"p": x, "q": (x,), "r": x})


@both
def test_an_optional_input_left_out_or_added_is_named(front_end: str) -> None:
    model, x = Two(optional), example()
    without, given = o0(model, (x,), None, front_end), o0(model, (x,), {"z": x}, front_end)
    assert_is_eager(without, model, x, None, z=None)
    with pytest.raises(fxamp.CaptureError, match=r"optional input 'y' was left out.*an example that has it"):
        without(x, x)
    with pytest.raises(fxamp.CaptureError, match=r"optional input 'z' was given.*missing.*leaves it out"):
        given(x)


@both
def test_constants_are_baked_and_a_change_is_named(front_end: str) -> None:
    model, x = Two(with_constants), example()
    converted = o0(model, (x,), {"flag": True, "times": 2}, front_end)
    assert_is_eager(converted, model, x, flag=True)
    assert_is_eager(converted, model, x, True, 2)
    with pytest.raises(fxamp.CaptureError, match=r"input 'flag' was captured as True.*gives False"):
        converted(x, False)
    with pytest.raises(fxamp.CaptureError, match=r"input 'flag' was captured as True.*gives False"):
        converted(x)
    with pytest.raises(fxamp.CaptureError, match=r"input 'times' was captured as 2.*gives 3"):
        converted(x, True, times=3)
    by_default = o0(model, (x,), None, front_end)
    assert_is_eager(by_default, model, x, False, 2)
    with pytest.raises(fxamp.CaptureError, match="'flag'"):
        by_default(x, True)


@both
def test_a_wrong_call_raises_what_python_raises(front_end: str) -> None:
    converted, x = o0(Two(), front_end=front_end), example()
    for args, kwargs in (((), {}), ((x, x), {}), ((x,), {"y": x}), ((x,), {"x": x})):
        with pytest.raises(TypeError, match=r"forward\(\)"):
            converted(*args, **kwargs)


@both
def test_another_dtype_or_kind_of_input_is_named(front_end: str) -> None:
    converted, x = o0(Two(), front_end=front_end), example()
    with pytest.raises(fxamp.CaptureError, match=r"input 'x' was captured as torch\.float32"):
        converted(x.double())
    with pytest.raises(fxamp.CaptureError, match=r"input 'x' was captured as torch\.float32.*Fabric.*32-true"):
        converted(x.bfloat16())
    for value in (3, [x]):
        with pytest.raises(fxamp.CaptureError, match="input 'x'"):
            converted(value)


@dataclasses.dataclass
class Batch:
    x: Tensor
    scale: Tensor


@dataclasses.dataclass
class Unregistered:
    x: Tensor


torch.export.register_dataclass(Batch)


@both
def test_a_registered_dataclass_goes_in_and_out(front_end: str) -> None:
    def forward(self: Any, batch: Batch) -> Batch:
        return Batch(self.l(batch.x), batch.scale)

    model, x = Two(forward), example()
    converted = o0(model, (Batch(x, x),), None, front_end)
    assert_is_eager(converted, model, Batch(x + 1, x * 2))
    assert type(converted(Batch(x, x))) is Batch


@both
def test_an_unregistered_dataclass_is_refused_with_the_line_to_write(front_end: str) -> None:
    def takes(self: Any, batch: Unregistered) -> Tensor:
        return self.l(batch.x)

    def gives(self: Any, x: Tensor) -> Unregistered:
        return Unregistered(self.l(x))

    with pytest.raises(fxamp.CaptureError, match=r"input 'batch' is a Unregistered.*register_dataclass"):
        o0(Two(takes), (Unregistered(example()),), None, front_end)
    with pytest.raises(fxamp.CaptureError, match=r"the output is a Unregistered.*register_dataclass"):
        o0(Two(gives), front_end=front_end)


@both
def test_outputs_come_in_the_container_of_the_model(front_end: str) -> None:
    from transformers.modeling_outputs import BaseModelOutput

    def forward(self: Any, x: Tensor) -> Any:
        y = self.l(x)
        output = BaseModelOutput(last_hidden_state=y, hidden_states=(x, y))
        return {"p": Point(y, None), "o": output, "n": [7, "s", True, x.shape[0]], "none": None, "empty": ()}

    model = Two(forward)
    converted = o0(model, front_end=front_end, dynamic_shapes="auto")
    assert_is_eager(converted, model, example(5))
    output = converted(example(5))
    assert type(output["o"]) is BaseModelOutput
    assert type(output["p"]) is Point


@both
@pytest.mark.parametrize("empty", [None, ()])
def test_an_output_without_tensors(front_end: str, empty: Any) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return empty

    assert o0(Two(forward), front_end=front_end)(example()) == empty


@both
def test_outputs_keep_their_identity(front_end: str) -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        written = x.add_(1)
        y = self.l(x)
        return x, y, y, self.l.weight, written

    model, x = Two(forward), example()
    out = o0(model, front_end=front_end)(x)
    assert out[0] is x
    assert out[4] is x
    assert out[1] is out[2]
    assert out[3] is model.l.weight


# Other kinds of modules.


@both
def test_a_graph_module_keeps_both_modes(front_end: str) -> None:
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(6, 6), nn.Dropout()))
    converted = o0(model, front_end=front_end)
    for training in (True, False):
        model.train(training)
        converted.train(training)
        assert_is_eager(converted, model)


def test_an_exported_program_is_held_to_the_mode_it_was_exported_in() -> None:
    program = torch.export.export(nn.Sequential(nn.Linear(6, 6), nn.Dropout()).eval(), (example(),))
    converted = o0(program)  # type: ignore[arg-type]
    assert_same(converted(example()), program.module()(example()))
    with pytest.raises(fxamp.CaptureError, match="mode was fixed when it was exported"):
        converted.eval()(example())


def test_an_exported_program_that_no_mode_changes_serves_both() -> None:
    program = torch.export.export(Two(), (example(),))
    converted = o0(program)  # type: ignore[arg-type]
    assert_same(converted.eval()(example()), program.module()(example()))


def test_an_exported_program_keeps_the_dynamic_sizes_it_was_exported_with() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU()), example()
    free = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    longer = torch.cat([x, x])
    assert_same(o0(free, dynamic_shapes="auto")(longer), model(longer))  # type: ignore[arg-type]
    with pytest.raises(fxamp.CaptureError, match="dimension 0 of input 'input' was specialised"):
        o0(torch.export.export(model, (x,)), dynamic_shapes="auto")(longer)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_symbolic_tracing_needs_no_inputs(level: str) -> None:
    model = LeNet5()
    converted = fxamp.convert(model, policy=level)
    assert converted.plan.capture == "fx"
    images = torch.randn(3, 1, 28, 28)
    torch.testing.assert_close(converted(images), model(images), rtol=0, atol=0 if level == "O0" else 0.05)


@pytest.mark.parametrize("forward", [optional, with_constants])
def test_without_inputs_an_optional_argument_has_its_default(forward: Callable[..., Any]) -> None:
    model = Two(forward)
    converted = fxamp.convert(model, policy="O0")
    assert_is_eager(converted, model)
    with pytest.raises(fxamp.CaptureError, match="optional input"):
        converted(example(), example())


def test_without_inputs_isinstance_is_refused() -> None:
    def forward(self: Any, x: Any) -> Tensor:
        return self.l(x[0] if isinstance(x, tuple) else x)

    with pytest.raises(fxamp.CaptureError, match=r"isinstance\(\) on a traced value at .*test_capture\.py:\d+"):
        fxamp.convert(Two(forward))


def test_without_inputs_variadic_arguments_are_refused() -> None:
    with pytest.raises(fxamp.CaptureError, match=r"takes \*xs, \*\*more.*Pass args and kwargs"):
        fxamp.convert(Two(variadic))


def test_a_plain_tensor_of_the_model_becomes_a_constant_of_both_front_ends() -> None:
    for front_end in FRONT_ENDS:
        model = Two(lambda_times_table)
        model.table = torch.arange(6.0)
        converted = o0(model, front_end=front_end)
        assert_is_eager(converted, model)
        assert list(converted.state_dict()) == list(model.state_dict())


def lambda_times_table(self: Any, x: Tensor) -> Tensor:
    return self.l(x) * self.table


# Bad input.


def test_leaves_of_example_containers_are_all_tensors_of_the_graph() -> None:
    x = example()
    converted = o0(Two(nested), ({"p": x, "q": (x,)},))
    assert [leaf.name for leaf in converted.call_spec.leaves] == ["batch['p']", "batch['q'][0]"]
    assert len(pytree.tree_leaves(converted.call_spec.bind(({"p": x, "q": (x,)},), {}))) == 2


class Attends(nn.Module):
    """Calls a method of its own and a function from forward()."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)

    def attend(self, x: Tensor) -> Tensor:
        weights = x @ x.mT  # the line of the product
        return weights @ self.l(x)  # the line of the layer

    def forward(self, x: Tensor) -> Tensor:
        return activated(self.attend(x))


def activated(x: Tensor) -> Tensor:
    return x.exp()  # the line of the function


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_node_names_the_line_of_the_method_or_function_that_made_it(front_end: str) -> None:
    x = torch.randn(4, 6)
    plan = fxamp.plan_of(fxamp.convert(Attends(), (x,), policy="O1,dtype=bf16", capture=front_end))
    said = {d.key: d.source.rpartition("# the line of the ")[2] for d in plan.decisions}
    assert said["/matmul#0"] == "product"
    assert said["l/linear#0"] == said["/matmul#1"] == "layer"
    assert said["/exp#0"] == "function"
