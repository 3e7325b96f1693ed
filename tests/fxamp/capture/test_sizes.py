"""A graph takes other sizes where the model does, and says which it does not take."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import fxamp
from reports.zoo import BY_NAME, GraphConv
from tests.support.helpers import (
    FRONT_ENDS,
    Two,
    assert_is_eager,
    example,
    o0,
)

both = pytest.mark.parametrize("front_end", FRONT_ENDS)


def plain(self: Any, x: Tensor) -> Tensor:
    return self.m(self.l(x))


def variadic(self: Any, *xs: Tensor, **more: Tensor) -> Tensor:
    return self.l(xs[0]) + xs[1] * more["b"]


def nested(self: Any, batch: dict[str, Any]) -> dict[str, Any]:
    return {"a": self.l(batch["p"]), "b": [batch["q"][0], None, 3]}


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


def test_sizes_that_are_returned_are_sizes_and_those_of_the_call() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.l(x), torch.broadcast_shapes(x.shape, (1, 6)), {"sizes": [x.shape, (x.shape[0], "rows")]}

    model = Two(forward)
    for converted in (o0(model, dynamic_shapes="auto"), copy.deepcopy(o0(model, dynamic_shapes="auto"))):
        _, shape, rest = converted(example(7))
        assert type(shape) is torch.Size
        assert type(rest["sizes"][0]) is torch.Size
        assert (shape, rest) == model(example(7))[1:]
