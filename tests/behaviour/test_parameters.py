"""Parameters: trained ones are FP32, frozen ones of any dtype are read as they are, as under torch.autocast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.cli.main import main
from tests.support.front_ends import BF16, FP16, FRESH, captured, each_capture
from tests.support.helpers import Two, example

pytestmark = FRESH
REFUSED = r"trainable parameter\(s\) are low already: 'l\.weight' .*from_pretrained\(\.\.\., dtype=torch\.float32\)"


def _low_first(frozen: bool, dtype: torch.dtype = BF16) -> Two:
    torch.manual_seed(0)
    model = Two(lambda self, x: self.m(torch.tanh(self.l(x))))
    model.l.to(dtype).requires_grad_(not frozen)
    return model


@pytest.mark.default_case(capture="ahead")
@each_capture
def test_trainable_low_parameters_are_refused_in_train_mode_with_gradients(capture: str) -> None:
    with pytest.raises(fxamp.PolicyError, match=REFUSED):
        captured(_low_first(frozen=False), (example(),), capture)(example())


def test_a_train_step_refuses_them_too() -> None:
    model = _low_first(frozen=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(fxamp.PolicyError, match=r"from_pretrained\(\.\.\., dtype=torch\.float32\)"):
        fxamp.TrainStep(model, nn.MSELoss(), optimizer)


@pytest.mark.default_case(capture="ahead")
@each_capture
@pytest.mark.parametrize("grad", [True, False])
def test_they_are_a_note_in_eval_mode_or_without_gradients(grad: bool, capture: str) -> None:
    model, x = _low_first(frozen=False).train(not grad), example()
    with torch.set_grad_enabled(grad):
        module = captured(model, (x,), capture)
        got = module(x)
        with torch.autocast("cpu", BF16):
            assert torch.equal(got, model(x).float())
    notes = [n for n in fxamp.plan_of(module).notes if "trainable parameter(s) are low" in n]
    assert len(notes) == 1
    assert "'l.weight' (bfloat16)" in notes[0]


@pytest.mark.default_case(capture="first call")
@each_capture
def test_a_model_converted_in_eval_mode_is_refused_once_it_is_trained(capture: str) -> None:
    model, x = _low_first(frozen=False).eval(), example()
    module = captured(model, (x,), capture)
    module(x)
    module.train()
    with torch.no_grad():
        module(x)
    with pytest.raises(fxamp.PolicyError, match=REFUSED):
        module(x)
    model.l.requires_grad_(False)
    assert module(x).requires_grad


def test_they_are_a_note_in_a_plan_and_in_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = fxamp.plan(_low_first(frozen=False), (example(),), policy="O1,dtype=bf16")
    assert [n for n in plan.notes if "trainable parameter(s) are low" in n]
    target = tmp_path / "target.py"
    target.write_text(
        "import torch\nfrom torch import nn\n\n\ndef make():\n"
        "    return nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)), (torch.ones(2, 4),)\n"
    )
    assert main(["report", f"{target}:make", "--policy", "O1,dtype=bf16"]) == 0
    assert "trainable parameter(s) are low: '0.weight' (bfloat16)" in capsys.readouterr().out


@pytest.mark.default_case(name="fp16", low=torch.float16, capture="first call")
@each_capture
@pytest.mark.parametrize("held", [BF16, FP16])
@pytest.mark.parametrize(("name", "low"), [("bf16", BF16), ("fp16", FP16)])
def test_frozen_low_parameters_are_read_as_under_autocast(
    name: str, low: torch.dtype, held: torch.dtype, capture: str
) -> None:
    model, x = _low_first(frozen=True, dtype=held), example()
    with torch.autocast("cpu", low):
        expected = model(x)
    expected.float().sum().backward()
    gradient = model.m.weight.grad
    model.zero_grad()
    module = captured(model, (x,), capture, f"O1,dtype={name}")
    got = module(x)
    got.sum().backward()
    assert torch.equal(got, expected.float())
    assert gradient is not None
    assert model.m.weight.grad is not None
    assert torch.equal(model.m.weight.grad, gradient)
    assert not fxamp.plan_of(module).deviations
    assert model.l.weight.dtype == held


@pytest.mark.default_case(capture="first call")
@each_capture
def test_a_value_that_the_code_casts_to_the_other_low_dtype_stays_out_of_low(capture: str) -> None:
    model, x = Two(lambda self, x: self.m(self.l(x).half())), example()
    module = captured(model, (x,), capture)
    module(x)
    assert [d.code for d in fxamp.plan_of(module).decisions if d.op == "linear"] == ["low", "user_cast"]


class _Quantized(torch.Tensor):
    """A weight in 8 bits, which each op that reads it dequantizes, as those of torchao are."""

    ints: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, ints: Tensor, scale: Tensor, dtype: torch.dtype) -> _Quantized:
        made: _Quantized = torch.Tensor._make_wrapper_subclass(cls, ints.shape, dtype=dtype)
        made.ints, made.scale = ints, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["ints", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> _Quantized:
        return _Quantized(inner["ints"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first, kwargs = args[0], kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(first.ints, first.scale, kwargs.get("dtype", first.dtype))
        if func is torch.ops.aten.t.default:
            return cls(first.ints.t(), first.scale.t(), first.dtype)
        plain = torch.utils._pytree.tree_map(
            lambda t: t.ints.to(t.dtype) * t.scale.to(t.dtype) if isinstance(t, cls) else t, (args, kwargs)
        )
        return func(*plain[0], **plain[1])


@pytest.mark.default_case(capture="first call")
@each_capture
def test_quantized_weights_are_read_as_under_autocast_and_listed(capture: str) -> None:
    torch.manual_seed(0)
    model, x = Two(), example()
    weight = model.l.weight.detach()
    scale = weight.abs().amax(1, keepdim=True) / 127
    quantized = _Quantized((weight / scale).round().to(torch.int8), scale, torch.float32)
    model.l.weight = nn.Parameter(quantized, requires_grad=False)
    with torch.no_grad():
        module = captured(model, (x,), capture)
        got = module(x)
        with torch.autocast("cpu", BF16):
            assert torch.equal(got, model(x).float())
    plan = fxamp.plan_of(module)
    assert not plan.deviations
    assert [n for n in plan.notes if "opaque" in n] == [
        "1 weight(s) are opaque, read as under autocast: 'l.weight' (_Quantized)"
    ]


def _embedded(self: Any, x: Tensor) -> Tensor:
    return self.m(self.e(x.argsort(-1))) + x.sum()


@pytest.mark.default_case(capture="first call")
@each_capture
def test_rows_of_a_frozen_table_in_the_other_low_dtype_are_cast_as_under_autocast(capture: str) -> None:
    torch.manual_seed(0)
    model, x = Two(_embedded, e=nn.Embedding(8, 6, dtype=FP16).requires_grad_(False)), example()
    with torch.no_grad():
        module = captured(model, (x,), capture)
        got = module(x)
        with torch.autocast("cpu", BF16):
            assert torch.equal(got, model(x).float())
    assert not fxamp.plan_of(module).deviations
