"""An op that the device cannot run in low is kept FP32, and the report says so."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch import library as operators

import fxamp
from passes.assign.colour import kernels
from passes.contract.errors import CaptureError
from passes.ops import rules
from tests.support.exported import plan_of
from tests.support.front_ends import convert
from tests.support.helpers import Layers, Two, example, in_turns

FP32_ONLY = "fxamp_kernels::fp32_only"
ANY_FLOAT = "fxamp_kernels::any_float"


@operators.custom_op(FP32_ONLY, mutates_args=())
def fp32_only(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise RuntimeError(f"not implemented for {x.dtype}")
    return x * 2


@operators.custom_op(ANY_FLOAT, mutates_args=())
def any_float(x: Tensor) -> Tensor:
    return x * 2


for op in (fp32_only, any_float):
    op.register_fake(torch.empty_like)


@pytest.fixture(autouse=True)
def _rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_custom", dict(rules._custom))
    for name in (FP32_ONLY, ANY_FLOAT):
        fxamp.register_rule(name, "low")


@pytest.mark.default_case(front_end="graph")
@pytest.mark.parametrize("front_end", ["view", "graph"])
def test_a_custom_op_that_fails_in_low_is_kept(front_end: str) -> None:
    def f(self: Two, x: Tensor) -> Any:
        return self.m(any_float(fp32_only(self.l(x))))

    torch._dynamo.reset()
    model, x = Two(f), example()
    with torch.no_grad():
        module = convert(model, (x,), front_end)
        assert torch.allclose(module(x), model(x), atol=0.05)
    decided = {d.op: d for d in fxamp.plan_of(module).decisions}
    assert decided[FP32_ONLY].colour == "float32"
    assert decided[FP32_ONLY].reason == "keep: no kernel for torch.bfloat16 on this cpu"
    assert decided[FP32_ONLY] in fxamp.plan_of(module).deviations
    [told] = [note for note in fxamp.plan_of(module).notes if note.startswith("defect of a rule")]
    assert f"register_rule('{FP32_ONLY}', 'low') does not hold at /{FP32_ONLY}#0, which has no kernel" in told
    assert "register it as 'fp32'" in told
    assert decided[ANY_FLOAT].colour == "bfloat16"


@pytest.mark.filterwarnings("ignore:FP16 gradients", "ignore:The tensor attributes self.lstm._flat_weights")
def test_an_lstm_in_fp16_runs_wherever_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def tagged(self: Any, x: Tensor) -> Any:
        return self.head(self.lstm(x)[0])

    model, x = Layers(tagged, lstm=nn.LSTM(6, 5, batch_first=True), head=nn.Linear(5, 3)), torch.randn(2, 4, 6)
    module = convert(model, (x,), "graph", "O1,dtype=fp16")
    module(x).sum().backward()
    assert torch.allclose(module(x), model(x), atol=0.02)
    [lstm] = [d for d in fxamp.plan_of(module).decisions if d.op == "lstm"]
    try:
        torch.nn.LSTM(2, 2).half()(torch.zeros(1, 1, 2).half())
    except RuntimeError:
        assert (lstm.colour, lstm.code) == ("float32", "keep")
    else:
        assert lstm.colour == "float16"


def test_to_try_an_op_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    @operators.custom_op("fxamp_kernels::noise", mutates_args=())
    def noise(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    noise.register_fake(torch.empty_like)
    fxamp.register_rule("fxamp_kernels::noise", "low")

    def f(self: Two, x: Tensor) -> Any:
        return noise(self.l(x))

    model, x = Two(f), example()
    before = torch.get_rng_state()
    with mock.patch.object(kernels, "_runs", wraps=kernels._runs) as tried:
        plan_of(model, x)
    assert tried.called
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.default_case(front_end="view", level="O2")
@pytest.mark.filterwarnings("ignore:FP16 gradients")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("front_end", ["view", "graph"])
def test_an_op_that_one_low_dtype_lacks_in_training_alone(front_end: str, level: str) -> None:
    def f(self: Two, x: Tensor) -> Any:
        y = self.l(x)
        return nn.functional.rrelu(y, training=True), nn.functional.rrelu(y)

    torch._dynamo.reset()
    model, x = Two(f), example()
    module = convert(model, (x,), front_end, f"{level},dtype=fp16")
    torch.manual_seed(0)
    with torch.no_grad():
        got = module(x)
        torch.manual_seed(0)
        torch.testing.assert_close(got, model(x), atol=0.01, rtol=0.01)
    try:
        torch.rrelu(torch.zeros(1).half(), training=True)
    except NotImplementedError:
        noisy, plain = [d.colour for d in fxamp.plan_of(module).decisions if d.op == "rrelu"]
        assert noisy == "float32"
        assert plain == "float16" or level == "O2"  # which places it where it is read


@pytest.mark.default_case(front_end="graph")
@pytest.mark.parametrize("front_end", ["view", "graph"])
def test_an_op_of_torchs_without_a_low_kernel_is_kept(front_end: str) -> None:
    def f(self: Two, x: Tensor) -> Tensor:
        y = self.l(x)
        return torch.complex(y, y).abs()  # which autocast would give BF16

    model, x = Two(f), torch.randn(4, 6)
    converted = convert(model, (x,), front_end, "O1,dtype=bf16")
    got = converted(x)
    with torch.autocast("cpu"):
        y = model.l(x).float()
    assert torch.equal(got, torch.complex(y, y).abs())
    assert {d.code for d in fxamp.plan_of(converted).decisions if d.op == "complex"} == {"keep"}


@pytest.mark.default_case(front_end="view")
@pytest.mark.parametrize("front_end", ["view", "graph"])
def test_a_graph_over_two_devices(front_end: str) -> None:
    def f(self: Any, x: Tensor) -> Any:
        y = self.here(x)
        return y, self.there(y.to("meta"))

    layer = nn.Linear(4, 4)
    model, x = Layers(f, here=layer, there=nn.Linear(4, 4, device="meta")), torch.randn(2, 4)
    converted = convert(model, (x,), front_end, "O1,dtype=bf16")
    here, there = converted(x)
    with torch.autocast("cpu"):
        assert torch.equal(here, layer(x).float())
    assert (there.device.type, there.dtype) == ("meta", torch.float32)
    # Autocast for one device casts nothing on the other, whose kernel then rejects a low operand beside its weight.
    assert [d.colour for d in fxamp.plan_of(converted).decisions if d.op == "linear"] == ["bfloat16", "float32"]


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="the op raises under autocast, and breaks the graph there")
@pytest.mark.parametrize(("kind", "policy"), in_turns([2, -2, "nuc"], ["O1", "O2", "O3"]))
def test_a_matrix_norm_that_has_no_low_kernel_is_fp32(kind: Any, policy: str) -> None:
    def f(self: Two, x: Tensor) -> Any:
        return torch.linalg.matrix_norm(self.l(x), kind)

    model, x = Two(f), example()
    module = convert(model, (x,), "graph", policy)
    assert {d.op: d.colour for d in fxamp.plan_of(module).decisions} == {
        "linear": "bfloat16",
        "linalg_matrix_norm": "float32",
    }
    assert torch.allclose(module(x), model(x), rtol=0.05)
    with pytest.raises(CaptureError, match="Low precision dtypes not supported"):  # a view is traced under autocast
        convert(model, (x,), "view", policy)


def test_a_norm_of_low_values_that_only_its_kernel_refuses_is_fp32() -> None:
    def f(self: Two, x: Tensor) -> Any:
        return torch.linalg.norm(self.l(x), 2)  # of a matrix, though its arguments alone do not say so

    plan = plan_of(Two(f), example())
    assert {d.op: d.colour for d in plan.decisions} == {"linear": "bfloat16", "linalg_norm": "float32"}
    assert plan.decisions[-1].reason == "keep: no kernel for torch.bfloat16 on this cpu"


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # which torch says once in a process
def test_complex_numbers_of_low_values_that_the_author_made_stay_as_written() -> None:
    def f(self: Two, x: Tensor) -> Any:
        return torch.complex(x.half(), x.half())

    policy = "O1,device=cuda,dtype=fp16"
    decided = {d.op: d for d in plan_of(Two(f), example(), policy=policy).decisions}
    assert decided["complex"].reason == "as_written: no kernel for torch.float16 on this cuda"
    module = fxamp.convert(Two(f), example())
    assert module(example()).dtype == torch.complex32


def test_what_fake_tensors_cannot_run_stays_as_it_was_captured() -> None:
    def f(self: Two, x: Tensor, at: Tensor) -> Any:
        return self.l(x.float()), *torch.tensor_split(x, at)  # into pieces whose sizes are values of a tensor

    args = (example().half(), torch.tensor([1, 3]))
    module = convert(Two(f), args, "graph", "O1,dtype=fp16")
    assert [t.dtype for t in module(*args)] == [torch.float32, *[torch.float16] * 3]
    decided = {d.op: d.reason for d in fxamp.plan_of(module).decisions}
    assert decided["tensor_split"] == "as_written: fake tensors cannot run it"


WRITER = "fxamp_kernels::writer"


@operators.custom_op(WRITER, mutates_args=())
def writer(x: Tensor, scale: Tensor) -> Tensor:
    x.mul_(2)
    return x + scale


writer.register_fake(lambda x, scale: torch.empty_like(x))


@pytest.mark.parametrize(
    ("kind", "front_end"), in_turns(["low", "fp32", "promote", "follow", "keep"], ["view", "graph"])
)
def test_a_registered_op_that_writes_and_does_not_say_so_is_refused_by_name(kind: str, front_end: str) -> None:
    def f(self: Two, x: Tensor) -> Any:
        y = self.l(x)
        return self.m(writer(y, x[0, :1])) + y

    fxamp.register_rule(WRITER, kind)
    torch._dynamo.reset()
    with (
        torch.no_grad(),
        pytest.raises(fxamp.PolicyError, match=rf"register_rule\('{WRITER}'\): the op writes .*mutates_args"),
    ):
        convert(Two(f), (example(),), front_end)(example())
