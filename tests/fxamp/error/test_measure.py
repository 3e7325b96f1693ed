"""Errors are measured against float64, as they are; the command fails where one is above its tolerance."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.cli.main import main
from passes.contract.errors import PolicyError
from tests.support.zoo import BY_NAME

CE = nn.functional.cross_entropy
X, Y = torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def gradients(model: nn.Module, x: Tensor) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
        loss = CE(model(x), Y)
    loss.backward()
    return loss.item(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def test_the_errors_of_autocast_are_those_computed_by_hand() -> None:
    model = net()
    found = fxamp.measure_error(model, X, Y, loss=CE, policies=["autocast", "O1"])
    assert (found.reference, found.measured, found.batches) == ("float64", True, 1)
    true, exact = gradients(net().double(), X.double())
    loss, got = gradients(model, X)
    errors = found["autocast"]
    assert errors.loss == pytest.approx(abs(loss - true), rel=1e-6)
    relative = {n: float((got[n] - g).norm() / g.norm()) for n, g in exact.items()}
    assert dict(errors.parameters) == pytest.approx(relative, rel=1e-6)
    assert errors.per_parameter == pytest.approx(math.sqrt(sum(e * e for e in relative.values()) / 4), rel=1e-6)
    assert found["O1"].parameters == pytest.approx(errors.parameters, rel=0.5)
    assert found["FP32"].gradient < 1e-5 < found["O1"].gradient
    assert found["O1"].values["0/linear#0"] == pytest.approx(0.003, rel=0.7)
    assert found.beyond(0.5) == ()
    assert found.beyond(1e-5) == ("autocast", "O1")


def test_a_view_and_a_step_bring_their_policy_and_their_loss() -> None:
    model = net()
    view = fxamp.convert(model, policy="O2,dtype=bf16")
    step = fxamp.TrainStep(view, CE, torch.optim.SGD(model.parameters(), 0.1))
    found = fxamp.measure_error(step, batches=[(X, Y), (X + 1, Y)])
    assert [e.policy for e in found.policies] == ["FP32", "O2,dtype=bf16"]
    assert found.batches == 2
    assert fxamp.measure_error(view, X, Y, loss=CE, policies="autocast")["autocast"].gradient > 0


def test_fp16_is_measured_with_a_scaled_loss() -> None:
    found = fxamp.measure_error(net(), X, Y, loss=CE, policies=["O1,dtype=fp16", "O1,dtype=bf16"])
    coarse, fine = found["O1,dtype=bf16"], found["O1,dtype=fp16"]
    assert fine.gradient < coarse.gradient / 4


class NamesFP32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) @ torch.ones(4, 4, dtype=torch.float32)
        return out


def test_where_float64_does_not_run_the_reference_is_fp32_and_that_is_said() -> None:
    found = fxamp.measure_error(NamesFP32(), X, Y, loss=CE, policies="O1")
    assert found.reference.startswith("FP32, since float64 does not run (RuntimeError")
    assert "measured against FP32" in str(found)


class Log(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * 0).log()


def test_a_batch_on_which_fp32_is_not_finite_is_refused_with_the_node() -> None:
    for diagnose in (fxamp.measure_error, fxamp.estimate_error):
        with pytest.raises(fxamp.PolicyError, match=r"batch 0: FP32 itself is not finite, first at /log#0"):
            diagnose(Log(), X, Y, loss=CE, policies="O1")


def test_constant_logits_say_warm_up_first() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    nn.init.zeros_(model[2].weight)  # type: ignore[arg-type]
    assert "Warm up first" in str(fxamp.measure_error(model, X, Y, loss=CE, policies="O1"))


def test_a_report_says_what_it_has() -> None:
    found = fxamp.measure_error(BY_NAME["hf_resnet"].build().eval(), BY_NAME["hf_resnet"].inputs(2)[1],
                         loss=BY_NAME["hf_resnet"].loss, policies="O1")  # fmt: skip
    assert len(repr(found).splitlines()) == 1
    data: Any = json.loads(found.to_json())
    assert data["policies"][1]["gradient"] == found["O1"].gradient
    assert "| O1 " in found.to_markdown()
    with pytest.raises(fxamp.PolicyError, match=r"has no 'O5'.*FP32, O1"):
        found["O5"]


TARGET = """
import torch
from torch import nn
import fxamp
X, Y = torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])
def step():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    view = fxamp.convert(model, policy="O2,dtype=bf16")
    return fxamp.TrainStep(view, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1)), (X, Y)
def alone():
    return nn.Linear(8, 4)
def lossless():
    return nn.Linear(8, 4), (X,)
"""


def test_the_command_leaves_with_0_1_or_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(TARGET)
    assert main(["error", "--measure", "net.py:step"]) == 0
    assert "measured against float64" in capsys.readouterr().out
    assert (
        main(["error", "--measure", "net.py:step", "--policy", "O1", "--policy", "autocast", "--output-format", "json"])
        == 0
    )
    assert [e["policy"] for e in json.loads(capsys.readouterr().out)["policies"]] == ["FP32", "O1", "autocast"]
    assert main(["error", "--measure", "net.py:step", "--tolerance", "1e-5"]) == 1
    said = capsys.readouterr().err
    assert re.search(r"O2,dtype=bf16: an error per parameter of \S+ is above --tolerance 1e-05", said)
    assert main(["error", "--measure", "net.py:step", "--tolerance", "0.5"]) == 0
    assert "above" not in capsys.readouterr().err
    for argv, said in (
        (["net.py:alone"], "let the target return (Linear, batch)"),
        (["net.py:lossless"], "has no loss; let TARGET return (fxamp.TrainStep("),
        (["net.py:step", "--tolerance", "0"], "is not a finite number above 0"),
        (["net.py:step", "--policy", "O9"], "O9"),
        (["net.py:step", "--tolerance", "nan"], "is not a finite number above 0"),
    ):  # fmt: skip
        assert main(["error", "--measure", *argv]) == 2
        assert said in capsys.readouterr().err


class Drawing(nn.Module):
    """Adds what a generator gives, which is another number for another dtype."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.draw = net(), draw

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out + self.draw(out) * out.exp()


class Mixed(nn.Module):
    """Has one parameter in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = net(), nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out * self.scale.exp().to(out.dtype)


def hooked() -> nn.Module:
    model: Any = net()
    model[0].weight.register_hook(lambda g: g * 3)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: Drawing(torch.randn_like), lambda: Drawing(torch.rand_like),
        lambda: Drawing(lambda t: t.new_empty(t.shape).normal_()),
        lambda: Drawing(lambda t: torch.bernoulli(t.detach().sigmoid())), hooked, Mixed,
    ],
    ids=["randn_like", "rand_like", "normal_", "bernoulli", "hooked", "mixed"],
)  # fmt: skip
def test_float64_is_the_same_model(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)  # the gradient of one number may be close to 0
    model = make()
    before = {name: (v.dtype, v.clone()) for name, v in model.state_dict().items()}
    found = fxamp.measure_error(model, X, Y, loss=CE, policies="O1,dtype=bf16")
    assert found.reference == "float64"
    assert found["FP32"].per_parameter < 1e-5 < found["O1,dtype=bf16"].per_parameter < 0.05
    assert all(v.dtype == dtype and torch.equal(v, was) for v, (dtype, was) in zip(
        model.state_dict().values(), before.values(), strict=True
    ))  # fmt: skip


def test_a_loss_may_read_the_parameters_of_the_model() -> None:
    model = net()

    def penalized(output: Tensor, target: Tensor) -> Tensor:
        return CE(output, target) + 1e-2 * torch.stack([p.square().sum() for p in model.parameters()]).sum()

    found = fxamp.measure_error(model, X, Y, loss=penalized, policies="O1,dtype=bf16")
    assert found["FP32"].per_parameter < 1e-5
    assert all(p.grad is None for p in model.parameters())


def test_inside_autocast_fp32_is_the_model_without_it() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = fxamp.measure_error(net(), X, Y, loss=CE, policies="O1,dtype=bf16")
    assert found["FP32"].per_parameter < 1e-5


def test_a_view_that_carries_out_a_plan_is_not_its_policy() -> None:
    model = net()
    plan = fxamp.plan_of(fxamp.convert(model, (X,), policy="O1,dtype=bf16,ops.gelu=fp32"))
    view = fxamp.convert(model, (X,), plan=plan)
    named = fxamp.measure_error(view, X, Y, loss=CE).policies[1].policy
    assert named.endswith(" by a plan")
    casts = [fxamp.measure_error(m, X, Y, loss=CE, policies="O1,dtype=bf16").policies[1].casts for m in (model, view)]
    assert casts[0] == casts[1] != fxamp.measure_error(view, X, Y, loss=CE).policies[1].casts


def test_what_is_not_a_number_is_null_in_json() -> None:
    model: Any = net()
    nn.init.constant_(model[0].weight, 1e6)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = fxamp.measure_error(model, X, Y, loss=CE, policies="O1,dtype=fp16").to_json()
    assert json.loads(text, parse_constant=refuse)["policies"][1]["loss"] is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"policies": ()}, "policies= is empty"),
        ({"loss": lambda o, y: o.sum() * 1j}, "a complex one of shape ()"),
        ({"batches": 3, "inputs": None, "target": None}, "not int"),
    ],
    ids=["policies", "complex", "batches"],
)
def test_bad_input_is_named(given: Any, says: str) -> None:
    asked = {"inputs": X, "target": Y, "loss": CE, **given}
    with pytest.raises(PolicyError, match=re.escape(says)):
        fxamp.measure_error(net(), **asked)


# What computes in 8 bits by itself.


class Float8(nn.Linear):
    """A linear layer over the weights of another, whose product is in 8 bits, as torchao's Float8Linear is."""

    def forward(self, x: Tensor) -> Tensor:
        low = [t.to(torch.float8_e4m3fn).to(t.dtype) for t in (x, self.weight)]
        return torch.nn.functional.linear(low[0], low[1], self.bias)


class Alone(nn.Module):
    """One that was made of no class of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


Float8.forward.__module__ = Alone.forward.__module__ = "torchao.float8.float8_linear"


def mean_square(out: Tensor) -> Tensor:
    return out.float().square().mean()


def test_modules_that_compute_in_8_bits_are_measured_against_what_they_were_made_of() -> None:
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    model = nn.Sequential(Float8(8, 16), nn.GELU(), Float8(16, 4))
    model.load_state_dict(plain.state_dict())
    x = torch.randn(16, 8)
    found = fxamp.measure_error(model, x, loss=mean_square, policies="O1,dtype=bf16")
    assert found.loss == pytest.approx(mean_square(plain(x)).item(), rel=1e-6)
    assert found["FP32"].gradient < 1e-6
    assert found["O1,dtype=bf16"].gradient > 0.02
    assert "2 modules of torchao (Float8: 0, 2)" in found.notes[0]
    assert "forward" not in vars(model[0])
    estimated = fxamp.estimate_error(model, x, loss=mean_square, policies="O1,dtype=bf16")
    assert any("in no row" in note for note in estimated.notes)
    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    assert any(note.startswith("keep: 2 modules of torchao") for note in fxamp.plan_of(view).notes)


def test_a_module_of_8_bits_that_was_made_of_nothing_known_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Alone())
    with pytest.raises(PolicyError, match=r"'1' \(Alone\) computes in 8 bits.*as it was before"):
        fxamp.measure_error(model, torch.randn(4, 8), loss=mean_square, policies="O1")


def test_torchaos_own_layer_is_measured_against_linear_ones() -> None:
    float8 = pytest.importorskip("torchao.float8")
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    x = torch.randn(16, 32)
    true = mean_square(plain(x)).item()
    model = float8.convert_to_float8_training(plain, config=float8.Float8LinearConfig(emulate=True))
    found = fxamp.measure_error(model, x, loss=mean_square, policies="O1,dtype=bf16")
    assert found.loss == pytest.approx(true, rel=1e-6)
    assert found["O1,dtype=bf16"].gradient > 0.02
