"""What the model's code reads of dtypes is autocast's: a cast, an argument, a number, a branch."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from fxamp.capture.model.captured import Autocast, Captured, Captures
from fxamp.capture.states import capture
from fxamp.convert import emit
from fxamp.dynamo.resolve import resolve
from passes.graph import notes
from passes.ops import ops
from passes.ops.recurrent import run_low
from tests.support.front_ends import at_levels
from tests.support.helpers import Two, assert_is_eager, autocast_runs_lstms, example, o0

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def captured(model: nn.Module, x: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Captured:
    found = capture(model, (example() if x is None else x,), autocast=Autocast("cpu", dtype, "cpu"))
    return found.graphs[0]


def casts(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and ops.name(n) == "to"]


# Every way in which code was found to read a dtype.


def in_the_call(self: Any, x: Tensor) -> Tensor:
    return self.m(torch.relu(self.l(x)).to(x.dtype))


def in_a_variable(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    wanted = y.dtype
    return self.m(y.float().exp().to(wanted))


def a_variable_that_another_dtype_took(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    dtype = y.dtype
    z = y.to(dtype)
    dtype = torch.float64
    return z.to(dtype).exp().to(torch.float32) + y


def a_literal_cast_beside_a_read(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    return (y.to(torch.float32) + torch.ones(6, dtype=y.dtype)).to(torch.float32) * 1.001


def by_keyword(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    return y.float().exp().to(dtype=y.dtype)


def by_type(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    return y.float().exp().type(y.dtype)


def with_a_device(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    return y.float().exp().to(y.device, y.dtype) + y.float().cos().to(device=y.device, dtype=y.dtype)


def by_a_tensor(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    return y.float().exp().to(y) + y.float().sin().type_as(y)


def of_a_weight(self: Any, x: Tensor) -> Tensor:
    return self.l(torch.relu(self.l(x)).to(self.m.weight.dtype))


def of_factories(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    made = torch.ones(6, dtype=y.dtype) * 1.001 + torch.full((6,), 0.3, dtype=y.dtype)
    return y + made + torch.arange(6, dtype=y.dtype) / 3 + torch.tensor([0.1] * 6, dtype=y.dtype) + y.new_ones(6)


def of_a_softmax(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    return self.m(F.softmax(y, dim=1, dtype=y.dtype)) + torch.log_softmax(y, 1, dtype=y.dtype)


def of_a_sum(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    norm = torch.linalg.vector_norm(y, dim=-1, dtype=y.dtype)
    return y + (y > 0).sum(-1, keepdim=True, dtype=y.dtype) + norm[:, None]


def of_the_limits(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    y = y.masked_fill(y > 0.5, torch.finfo(y.dtype).min)
    return (y.sigmoid().clamp(min=torch.finfo(y.dtype).tiny).log() / (y.amax(-1, keepdim=True) ** 2 + 1)).clamp(-9, 9)


def of_a_distribution(self: Any, x: Tensor) -> Tensor:
    return torch.distributions.Bernoulli(probs=self.l(x).sigmoid(), validate_args=False).logits


def in_a_branch(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    if y.dtype != torch.float32:
        y = (y.float() * 1.001).to(y.dtype)
    return self.m(y) if y.element_size() < 4 else y


def of_masked_ops(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    return torch.masked.softmax(y, 1, mask=y > 0, dtype=y.dtype).nan_to_num() + y


WAYS = [
    in_the_call, in_a_variable, a_variable_that_another_dtype_took, a_literal_cast_beside_a_read, by_keyword, by_type,
    with_a_device, by_a_tensor, of_a_weight, of_factories, of_a_softmax, of_a_sum, of_the_limits, of_a_distribution,
    in_a_branch, of_masked_ops,
]  # fmt: skip

every_way = pytest.mark.parametrize(
    "way", [w if at % 2 == 0 else pytest.param(w, marks=pytest.mark.matrix) for at, w in enumerate(WAYS)]
)


@functools.cache
def of_way(way: Callable[..., Any]) -> tuple[nn.Module, dict[str, Callable[[], Any]]]:
    """Return the model, and for each policy what converts it: it is captured once for each low dtype."""
    torch.manual_seed(0)
    model = Two(way).eval()
    policies = [f"{level},dtype={low}" for level in ("O0", "O1", "O2", "O3") for low in LOW]
    return model, dict(zip(policies, at_levels(model, (example(),), "export", *policies), strict=True))


@pytest.mark.parametrize("low", ["bf16", pytest.param("fp16", marks=pytest.mark.matrix)])
@every_way
def test_what_the_code_reads_of_dtypes_is_autocasts(way: Callable[..., Any], low: str) -> None:
    (model, convert), x = of_way(way), example()
    converted = convert[f"O1,dtype={low}"]()
    with torch.autocast("cpu", LOW[low]):
        expected = model(x)
    assert torch.equal(converted(x), expected.float())
    assert not converted.plan.deviations
    assert not [note for note in converted.plan.notes if "defect of a rule" in note]


class Recurrent(nn.Module):
    """Reads the dtype of what a recurrent layer gives, which fake tensors do not have."""

    def __init__(self, layer: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.layer = layer(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)[0]
        return x.exp().to(y.dtype) + y + torch.finfo(y.dtype).eps


@pytest.mark.parametrize("layer", [nn.LSTM, pytest.param(nn.RNN, marks=pytest.mark.matrix)])
def test_the_dtype_of_a_recurrent_layer_is_that_of_its_kernel(layer: Callable[..., nn.RNNBase]) -> None:
    if layer is nn.LSTM and not autocast_runs_lstms():
        pytest.skip("torch.autocast cannot run it on this CPU")

    torch.manual_seed(0)
    model, x = Recurrent(layer), torch.randn(2, 3, 6)
    converted = fxamp.convert(model, (x,), policy="O1,dtype=bf16", capture="export", dynamic_shapes=None)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(converted(x), model(x))
    assert not [note for note in converted.plan.notes if "defect of a rule" in note]


class CallsKernel(nn.Module):
    """Calls the function of torch under `nn.RNN`, with weights of its own, and has no such layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(6, 6), torch.randn(6, 6), torch.randn(6), torch.randn(6)])

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(1, x.shape[0], 6)
        y = torch.rnn_tanh(x, state, list(self.weights), True, 1, 0.0, False, False, True)[0]
        return x.exp().to(y.dtype) + y + torch.finfo(y.dtype).eps


def test_a_kernel_of_recurrent_layers_that_is_called_directly_gives_autocasts_dtype() -> None:
    torch.manual_seed(0)
    model, x = CallsKernel(), torch.randn(2, 3, 6)
    run_low.cache_clear()
    assert_is_eager(fxamp.convert(model, (x,), policy="O0", capture="export"), model, x)
    converted = fxamp.convert(model, (x,), policy="O1,dtype=bf16", capture="export")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(converted(x), model(x))
    assert not [note for note in converted.plan.notes if "defect of a rule" in note]


@pytest.mark.parametrize("level", ["O2", pytest.param("O3", marks=pytest.mark.matrix)])
@every_way
def test_beyond_o1_it_stays_near(way: Callable[..., Any], level: str) -> None:
    (model, convert), x = of_way(way), example()
    got = convert[f"{level},dtype=bf16"]()(x)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x).float()
    assert got.dtype == torch.float32
    assert (got - expected).norm() <= 0.05 * expected.norm()


@every_way
def test_without_rounding_what_was_read_is_the_models_own(way: Callable[..., Any]) -> None:
    model, convert = of_way(way)
    assert_is_eager(convert["O0,dtype=bf16"](), model)


# What the comparison says of each cast.


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda self, x: self.l(x).float() * 2, ["literal"]),
        (lambda self, x: self.l(x).to(torch.float32) * 2, ["literal"]),
        (lambda self, x: self.l(x.float()), ["literal"]),
        (lambda self, x: self.l(x.to(torch.float32)), ["undecided"]),
        (by_keyword, ["literal", "relative"]),
        (by_type, ["literal", "relative"]),
    ],
)
def test_a_cast_is_what_the_two_captures_have_it(forward: Callable[..., Any], said: list[str]) -> None:
    assert [notes.note_of(n).cast for n in casts(captured(Two(forward)).graph)] == said


def test_values_have_the_dtypes_that_autocast_gives_as_an_oracle() -> None:
    graph = captured(Two(lambda self, x: self.m(torch.relu(self.l(x)).float()))).graph
    calls = [n for n in graph.nodes if n.op == "call_function" and ops.name(n) != "_assert_tensor_metadata"]
    seen = [notes.note_of(n).autocast for n in calls]
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]


def test_a_cast_that_does_nothing_is_no_detour_for_later_uses() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.l(x)
        return y.float() + y

    (cast,) = casts(captured(Two(forward)).graph)
    (add,) = cast.users
    assert add.args == (cast, cast.args[0])


@pytest.mark.parametrize("region", [torch.no_grad, lambda: torch.autocast("cpu", enabled=False)])
def test_no_alias_is_left_behind_in_a_region_either(region: Callable[[], Any]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with region():
            y = self.l(x).float()
        return self.m(y.to(x.dtype))

    model = Two(forward)
    graph = captured(model).graph
    assert not [n for n in graph.nodes if n.target is torch.ops.aten.alias.default]
    assert_is_eager(o0(model), model)


def test_a_model_that_takes_another_way_where_a_dtype_is_low_says_where() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.l(x)
        return self.m(y) if y.dtype == torch.float32 else self.m(y.relu())

    notes = fxamp.plan(Two(forward), (example(),), policy="O1,dtype=bf16", capture="export", dynamic_shapes=None).notes
    (note,) = [n for n in notes if "under torch.autocast the model runs other ops" in n]
    assert "aten.relu.default in module '' (test_relate.py:" in note


def test_a_rule_that_is_wrong_is_reported_with_the_place() -> None:
    graph = captured(Two(lambda self, x: torch.relu(self.l(x))))
    relu = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)[0]
    notes.note(relu, autocast=torch.float16)
    converted = emit(Captures((graph,)), resolve(fxamp.Policy("O1", dtype="bf16"), graph.model, None))
    (note,) = [n for n in converted.plan.notes if n.startswith("defect of a rule")]
    assert "torch.float16 at /relu#0, the rules say torch.bfloat16" in note


# What runs in one of the two ways alone.


class OnlyLow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6, 6, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) @ self.scale  # FP32 times BF16, but for autocast


def test_a_model_that_runs_under_autocast_alone_is_converted_and_o0_refused_with_its_own_error() -> None:
    model, x = OnlyLow(), example()
    converted = fxamp.convert(model, (x,), policy="O1,dtype=bf16", capture="export", dynamic_shapes=None)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(converted(x).float(), model(x).float())
    assert [n for n in converted.plan.notes if "only under torch.autocast" in n]
    with pytest.raises(fxamp.CaptureError, match="expected m1 and m2 to have the same dtype"):
        fxamp.convert(model, (x,), policy="O0", capture="export", dynamic_shapes=None)


def test_a_model_that_autocast_cannot_run_is_captured_without_it_and_that_is_said() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.l(x)
        if torch.is_autocast_enabled("cpu"):
            raise ValueError("not under autocast")
        return y

    model, x = Two(forward), example()
    converted = fxamp.convert(model, (x,), policy="O1,dtype=bf16", capture="export", dynamic_shapes=None)
    assert [n for n in converted.plan.notes if "captured without torch.autocast" in n and "not under autocast" in n]
    assert (converted(x) - model(x)).norm() <= 0.02 * model(x).norm()


def test_a_region_of_another_low_dtype_inside() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            y = self.l(x)
        return self.m(y.float()) + torch.ones(6, dtype=y.dtype) * 1.001

    torch.manual_seed(0)
    model, x = Two(forward), example()
    converted = fxamp.convert(model, (x,), policy="O1,dtype=bf16", capture="export", dynamic_shapes=None)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(converted(x), model(x).float())


def test_for_a_device_that_is_absent_reads_are_found_on_the_one_that_is_there() -> None:
    plan = fxamp.plan(Two(by_keyword), (example(),), policy="O1,device=cuda,dtype=fp16", dynamic_shapes=None)
    cast = [d for d in plan.decisions if d.op == "to"]
    assert [d.colour for d in cast] == ["float32", "float16"]


# No part of the product reads source code.


def test_no_module_of_the_product_reads_bytecode_or_source() -> None:
    root = Path(fxamp.__file__).parent.parent
    for path in [*root.glob("fxamp/**/*.py"), *root.glob("passes/**/*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        imported |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert imported.isdisjoint({"ast", "dis", "tokenize"}), path
        called = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        assert called.isdisjoint({"getsource", "getsourcelines", "co_code"}), path
