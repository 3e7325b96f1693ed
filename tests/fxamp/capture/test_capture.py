"""What capture takes and gives: every way of calling, sizes, containers, modules of other kinds, bad input."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.convert import resolve
from passes._torch import guards_of, pytree
from passes.contract.errors import NotFaithfulError
from reports.zoo import BY_NAME, GraphConv, LeNet5
from tests.support.helpers import (
    FRONT_ENDS,
    Two,
    assert_is_eager,
    assert_same,
    assert_untouched,
    example,
    fingerprint,
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


# Sizes.


@both
def test_another_batch_size(front_end: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
    converted = o0(model, front_end=front_end, dynamic_shapes="auto")
    for rows in (2, 5, 9):
        assert_is_eager(converted, model, example(rows))
    model.eval()
    converted.eval()
    assert_is_eager(converted, model, example(1))


def test_another_image_size() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    converted = o0(model, (torch.randn(2, 3, 9, 11),), dynamic_shapes="auto")
    assert_is_eager(converted, model, torch.randn(5, 3, 12, 8))


def test_another_sequence_length() -> None:
    model = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    converted = o0(model, (torch.randn(2, 5, 6),), dynamic_shapes="auto")
    assert_is_eager(converted, model, torch.randn(3, 8, 6))


def test_a_graph_with_another_number_of_nodes_and_edges() -> None:
    model = GraphConv()
    inputs = BY_NAME["graph_conv"].inputs
    converted = o0(model, *inputs(2), dynamic_shapes="auto")
    assert_is_eager(converted, model, *inputs(3)[0])


def test_a_batch_of_one_is_specialised_and_the_later_call_says_what_to_do() -> None:
    converted = o0(Two(), (example(1),))
    with pytest.raises(fxamp.CaptureError, match=r"dimension 0 of input 'x'.*Give an example batch of at least 2"):
        converted(example(4))


def test_another_number_of_channels_is_refused_without_talk_of_batches() -> None:
    converted = o0(nn.Conv1d(1, 2, 3), (torch.randn(4, 1, 8),))
    said = r"dimension 1 of input 'input' was specialised to 1 .*gives 2\. Pass a size of 1, or, .* convert with"
    with pytest.raises(fxamp.CaptureError, match=said):
        converted(torch.randn(4, 2, 8))


def test_a_module_that_the_policy_misspells_is_named_before_anything_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["fxamp.convert"], "capture_model", pytest.fail)
    model = nn.Sequential(OrderedDict(body=nn.Linear(4, 4), head=nn.Linear(4, 2)))
    for convert in (fxamp.convert, fxamp.plan):
        with pytest.raises(
            fxamp.PolicyError, match=r"modules\.haed=fp32 matches no module .*; the nearest name is 'head'"
        ):
            convert(model, (torch.randn(2, 4),), policy="O1,modules.haed=fp32")


def test_without_dynamic_shapes_other_sizes_are_refused() -> None:
    converted = o0(Two(), dynamic_shapes=None)
    with pytest.raises(fxamp.CaptureError, match=r"dimension 0 of input 'x' was specialised to 4.*gives 2"):
        converted(example(2))


@pytest.mark.parametrize(
    "shapes",
    [
        {"x": {0: Dim("rows")}},
        ({0: Dim("rows")},),
        ({0: Dim.AUTO, 1: Dim.STATIC},),
        ([Dim.AUTO, None],),
        {"x": (Dim.DYNAMIC, None)},
    ],
)
def test_dynamic_shapes_as_export_takes_them(shapes: Any) -> None:
    model = Two()
    converted = o0(model, dynamic_shapes=shapes)
    assert_is_eager(converted, model, example(7))


def test_nested_and_variadic_dynamic_shapes() -> None:
    x, rows = example(), {0: Dim.AUTO}
    converted = o0(Two(nested), ({"p": x, "q": (x,)},), dynamic_shapes={"batch": {"p": rows, "q": (None,)}})
    converted({"p": example(2), "q": (x,)})
    with pytest.raises(fxamp.CaptureError, match=r"input 'batch\['q'\]\[0\]' was specialised"):
        converted({"p": example(2), "q": (example(2),)})
    model = Two(variadic)
    for shapes in ({"xs": (rows, rows), "more": {"b": rows}}, {"xs": (rows, rows), "b": rows}):
        assert_is_eager(o0(model, (x, x), {"b": x}, dynamic_shapes=shapes), model, *[example(3)] * 2, b=example(3))


@pytest.mark.parametrize("shapes", ["all", {"y": {0: Dim.AUTO}}, (None, None), 3])
def test_dynamic_shapes_that_do_not_fit_the_inputs_are_refused(shapes: Any) -> None:
    with pytest.raises(fxamp.CaptureError, match=r"dynamic_shapes.*'x'|dynamic_shapes must be .* got 'all'"):
        o0(Two(), dynamic_shapes=shapes)


def test_the_bounds_of_a_dimension_hold_later() -> None:
    converted = o0(Two(), dynamic_shapes={"x": {0: Dim("rows", min=3, max=5)}})
    for rows in (2, 6):
        with pytest.raises(
            fxamp.CaptureError, match=r"captured for sizes that satisfy x\.size\(\)\[0\] [<>]= [35].*'x' \(\d, 6\)"
        ):
            converted(example(rows))


def test_a_branch_on_a_size_is_refused_for_the_other_side() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return self.l(x) * 2 + y if x.shape[0] > 3 else self.l(x)

    model, x = Two(forward), example()
    converted = o0(model, (x, x), dynamic_shapes="auto")
    assert_is_eager(converted, model, example(6), example(6))
    with pytest.raises(fxamp.CaptureError, match=r"x\.size\(\)\[0\] > 3"):
        converted(example(2), example(2))
    with pytest.raises(fxamp.CaptureError, match=r"x\.size\(\)\[0\] == y\.size\(\)\[0\]"):
        converted(example(4), example(5))


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


# Writes that Python spells as operators.


def in_place_on_a_view(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    v = y[:, :3]
    v += 1
    v -= x[:, 3:]
    v *= 2
    v /= 3
    return self.m(y)


def in_place_on_an_attribute(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    v = y.T
    v[0] = 1
    v *= 2
    w = v.mT
    w += 1
    return self.m(y)


def in_place_on_bits(self: Any, x: Tensor) -> Tensor:
    y = (x * 100).to(torch.int64)
    v = y.view(-1)
    v **= 2
    v //= 3
    v %= 4096
    v &= 63
    v |= 4
    v ^= 3
    v <<= 2
    v >>= 1
    return self.l(x) + y


def in_place_on_the_input(self: Any, x: Tensor) -> Tensor:
    x += 1
    return self.l(x)


def in_place_on_numbers(self: Any, x: Tensor) -> Tensor:
    n = x.shape[1]
    n += 3
    n -= 1
    n *= 5
    n //= 2
    n %= 7
    n **= 2
    n <<= 3
    n >>= 1
    n |= 8
    n &= 13
    n ^= 1
    m = k = x.shape[0]
    k += 1
    return self.l(x) * (n + 1) * m


def a_product_in_place(self: Any, x: Tensor) -> Tensor:
    y = x
    y @= self.m.weight  # a tensor has no such thing in place
    return self.l(y) + x


def in_place_on_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    self.count *= 2
    return self.l(x) * self.count


IN_PLACE = [
    in_place_on_a_view, in_place_on_an_attribute, in_place_on_bits, in_place_on_the_input, in_place_on_numbers,
    a_product_in_place, in_place_on_a_buffer,
]  # fmt: skip


class Counting(Two):
    count: Tensor


def counting(forward: Callable[..., Any]) -> Counting:
    model = Counting()
    model.register_buffer("count", torch.ones(()))
    model.__class__ = type(forward.__name__, (Counting,), {"forward": forward})
    return model


@both
@pytest.mark.parametrize("forward", IN_PLACE)
def test_an_operator_that_writes_is_a_write(front_end: str, forward: Callable[..., Any]) -> None:
    model = counting(forward)
    converted, ours, eager = o0(model, front_end=front_end), example(), example()
    assert not converted.plan.notes
    for _ in range(2):
        expected = called(model, eager), model.count.clone()
        model.count.fill_(1)
        assert_same((called(converted, ours), model.count), expected)
        assert_same(ours, eager)
        model.count.fill_(1)


def called(module: nn.Module, x: Tensor) -> Any:
    output = module(x)
    return output, torch.autograd.grad(output.square().sum(), list(module.parameters()), allow_unused=True)


@pytest.mark.parametrize("forward", IN_PLACE)
def test_an_operator_that_writes_is_one_without_inputs_and_in_bfloat16_too(forward: Callable[..., Any]) -> None:
    model = counting(forward)
    expected = model(example())
    for policy in ("O0", "O1"):
        model.count.fill_(1)
        converted = fxamp.convert(model, policy=policy, capture="fx")
        assert (converted(example()) - expected).norm() <= (0.02 if policy == "O1" else 0) * expected.norm()


def assigned(self: Any, x: Tensor) -> Tensor:
    self.count = self.count + 1  # the line
    return self.l(x) * self.count


def assigned_a_product(self: Any, x: Tensor) -> Tensor:
    self.count = self.count[None, None]
    self.count @= self.count
    return self.l(x)


def made(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    self.register_buffer("last", y.detach())
    return y


@both
@pytest.mark.parametrize(("forward", "name"), [(assigned, "count"), (assigned_a_product, "count"), (made, "last")])
def test_a_buffer_that_is_assigned_is_refused(front_end: str, forward: Callable[..., Any], name: str) -> None:
    model = counting(forward)
    before = fingerprint(model)
    with pytest.raises(NotFaithfulError, match=rf"assigns '{name}'.*in place"):
        o0(model, front_end=front_end, check=False)
    assert_untouched(model, before)


def test_the_line_that_assigns_a_buffer_is_named() -> None:
    with pytest.raises(NotFaithfulError, match=r"test_capture\.py:\d+: self\.count = .*# the line"):
        o0(counting(assigned), front_end="fx")


# Bad input.


@pytest.mark.parametrize(
    ("bad", "said"), [(3, "not int"), (Two, "the class Two: make an instance"), (None, "not NoneType")]
)
def test_what_is_no_module_is_refused(bad: Any, said: str) -> None:
    with pytest.raises(fxamp.NotAModuleError, match=said):
        fxamp.convert(bad, (example(),))


def test_converting_twice_is_refused() -> None:
    converted = o0(Two())
    with pytest.raises(fxamp.CaptureError, match=r"converted already.*plan_of"):
        fxamp.convert(converted, (example(),))
    with pytest.raises(fxamp.CaptureError, match="submodule '1' is converted already"):
        fxamp.convert(nn.Sequential(nn.ReLU(), converted), (example(),))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"args": (torch.zeros(2, 5),)}, "Two rejects the example inputs: RuntimeError"),
        ({"args": (1, 2, 3)}, r"Two rejects the example inputs: forward\(\) takes"),
        ({"args": ()}, r"Two rejects the example inputs: forward\(\) missing"),
        ({"args": 3}, "args is a tuple of example inputs, not int"),
        ({"kwargs": [3]}, "kwargs is a dict of example inputs, not list"),
        ({"capture": "trace"}, "capture='trace' is not one of auto, fx, export, jit"),
        ({"capture": "export"}, "needs example inputs"),
    ],
)
def test_bad_arguments_are_named_and_the_model_left_alone(options: dict[str, Any], said: str) -> None:
    model = Two()
    before = fingerprint(model)
    with pytest.raises(fxamp.CaptureError, match=said):
        fxamp.convert(model, **options)
    assert_untouched(model, before)


@both
def test_low_inputs_that_the_model_rejects_are_named(front_end: str) -> None:
    with pytest.raises(fxamp.CaptureError, match=r"rejects the example inputs.*'x' is torch\.bfloat16"):
        o0(Two(), (example().bfloat16(),), None, front_end)


def test_trainable_low_parameters_are_refused_and_frozen_ones_are_not() -> None:
    model = Two().bfloat16()
    with pytest.raises(fxamp.PolicyError, match=r"trainable.*'l\.weight' \(bfloat16\).*model\.float\(\)"):
        fxamp.convert(model, (example().bfloat16(),))
    fxamp.convert(model.requires_grad_(False), (example().bfloat16(),))


def test_a_failed_capture_names_construct_file_and_line() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.l(x) if x.sum().item() > 0 else self.m(x)  # the line

    model = Two(forward)
    before = fingerprint(model)
    with pytest.raises(fxamp.CaptureError, match=r"GuardOnDataDependent.*test_capture\.py:\d+ \(.*# the line\)"):
        o0(model)
    assert_untouched(model, before)


def test_leaves_of_example_containers_are_all_tensors_of_the_graph() -> None:
    x = example()
    converted = o0(Two(nested), ({"p": x, "q": (x,)},))
    assert [leaf.name for leaf in converted.call_spec.leaves] == ["batch['p']", "batch['q'][0]"]
    assert len(pytree.tree_leaves(converted.call_spec.bind(({"p": x, "q": (x,)},), {}))) == 2


def test_a_model_on_a_device_without_op_lists_is_refused_with_the_way_out() -> None:
    class Elsewhere(nn.Linear):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([OnMps()])

    class OnMps(Tensor):
        device = SimpleNamespace(type="mps")  # type: ignore[assignment]

    message = r"Elsewhere is on 'mps', for which fxamp has no op lists: move the model to one of cpu, cuda, xpu before"
    with pytest.raises(fxamp.PolicyError, match=message):
        resolve(fxamp.Policy(), Elsewhere(2, 2), None)
    assert resolve(fxamp.Policy(device="cuda"), Elsewhere(2, 2), None).device == "cuda"


def test_an_exporter_that_does_not_say_what_it_assumed_is_refused() -> None:
    with pytest.raises(fxamp.CaptureError, match="does not report its guards on sizes"):
        guards_of(SimpleNamespace())  # type: ignore[arg-type]


def test_what_is_logged_says_that_it_is_ours(caplog: pytest.LogCaptureFixture) -> None:
    def counts(self: Any, x: Tensor) -> Any:
        return checkpoint(self.l, x, use_reentrant=False)

    with caplog.at_level("WARNING", "fxamp"):
        fxamp.convert(Two(counts), policy="O1")
    assert [r.getMessage()[:32] for r in caplog.records] == ["fxamp: counts is captured at its"]


def test_sizes_that_are_returned_are_sizes_and_those_of_the_call() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.l(x), torch.broadcast_shapes(x.shape, (1, 6)), {"sizes": [x.shape, (x.shape[0], "rows")]}

    model = Two(forward)
    for converted in (o0(model, dynamic_shapes="auto"), copy.deepcopy(o0(model, dynamic_shapes="auto"))):
        _, shape, rest = converted(example(7))
        assert type(shape) is torch.Size
        assert type(rest["sizes"][0]) is torch.Size
        assert (shape, rest) == model(example(7))[1:]


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
