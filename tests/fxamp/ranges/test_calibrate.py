"""Ranges are measured in one run that rounds nothing; what comes near FP16's largest number runs in FP32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from passes.contract.errors import PlanError, PolicyError
from tests.support.exported import program_of
from tests.support.helpers import Layers, in_turns

FP16 = "O1,dtype=fp16"
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")]


class Net(nn.Module):
    """A net in which one value is ten times `factor` times another."""

    def __init__(self, factor: float = 1e3) -> None:
        super().__init__()
        self.first, self.last, self.factor = nn.Linear(8, 16), nn.Linear(16, 4), factor

    def forward(self, x: Tensor) -> Tensor:
        grown = self.first(x).sigmoid() * self.factor * 10
        out: Tensor = self.last(grown / self.factor)
        return out


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def test_ranges_are_those_of_the_model_in_fp32() -> None:
    model = Net()
    found = fxamp.calibrate(model, X, loss=mean_square)
    hidden = model.first(X)
    grown = hidden.sigmoid() * 1e4
    grown.retain_grad()
    mean_square(model.last(grown / 1e3)).backward()
    assert grown.grad is not None
    largest = max(float(t.detach().abs().max()) for t in (hidden, X))  # casts of its operands count
    assert found.values["first/linear#0"].largest == pytest.approx(largest)
    assert found.values["/mul#1"].largest == pytest.approx(float(grown.detach().abs().max()))
    assert found.gradients["/mul#1"].largest == pytest.approx(float(grown.grad.abs().max()))
    assert found.values["/sigmoid#0"].bound == 1.0
    assert found.values["first/linear#0"].bound is None
    assert all(held.not_finite == 0 for held in (*found.values.values(), *found.gradients.values()))


class Padded(nn.Module):
    """Self-attention over sequences of different lengths, whose padding torch masks with -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1]) >= lengths[:, None]
        out: Tensor = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return out


def test_the_mask_of_a_padded_batch_is_not_too_large_for_fp16() -> None:
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    model, inputs = Padded(), (x, torch.tensor([4, 2]))
    found = fxamp.calibrate(model, inputs, loss=mean_square)
    assert "0 nodes too large" in str(found)
    assert all(held.not_finite == 0 for held in found.values.values())
    views = [fxamp.convert(model, inputs, policy=FP16, calibration=ranges) for ranges in (None, found)]
    plain, calibrated = ([(d.key, d.colour) for d in fxamp.plan_of(view).decisions] for view in views)
    assert plain == calibrated
    with torch.no_grad():
        model.attention.out_proj.weight[0, 0] = torch.inf
    assert any(held.not_finite for held in fxamp.calibrate(model, inputs, loss=mean_square).values.values())


@pytest.mark.parametrize("affine", [True, False])
def test_norms_are_bounded_by_their_size_and_their_weights(affine: bool) -> None:
    def norms(self: Any, x: Tensor, scale: Tensor) -> Tensor:
        normed = self.rms(self.layer(x * 1e4)) + nn.functional.layer_norm(x, (8,), scale * 2)
        return self.last(normed.softmax(-1))

    layer, rms = nn.LayerNorm(8, elementwise_affine=affine), nn.RMSNorm(8, elementwise_affine=affine)
    model = Layers(norms, layer=layer, rms=rms, last=nn.Linear(8, 4))
    if affine:
        nn.init.uniform_(layer.weight, -3, 3)
        nn.init.uniform_(layer.bias, -2, 2)
        nn.init.constant_(rms.weight, -0.5)
    spike = torch.zeros(2, 8).index_fill(1, torch.tensor([3]), 1.0)  # as far from the others as can be
    found = fxamp.calibrate(model, (spike, torch.rand(8)), loss=mean_square)
    weight, bias = (float(p.detach().abs().max()) for p in layer.parameters()) if affine else (1.0, 0.0)
    assert found.values["layer/layer_norm#0"].bound == pytest.approx(8**0.5 * weight + bias)
    assert found.values["rms/rms_norm#0"].bound == pytest.approx(8**0.5 * (0.5 if affine else 1.0))
    for key in ("layer/layer_norm#0", "rms/rms_norm#0"):
        held = found.values[key]
        assert held.largest is not None
        assert held.bound is not None
        assert held.largest <= held.bound
    assert found.values["/layer_norm#0"].bound is None  # its weight is computed
    assert found.values["/softmax#0"].bound == 1.0


def test_what_fp16_rounds_to_0_is_counted_in_shares_with_the_loss_scale() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(x.abs().clamp_min(0.1).clamp_max(0.9) * torch.tensor([1e-9, 1.0] * 4))
            return out

    torch.manual_seed(0)
    found = fxamp.calibrate(Small(), X, loss=lambda out: (out * 1e-6).mean())
    held = found.values["/mul#0"]
    assert (held.zero, held.subnormal) == (0.5, 0.0)
    assert found.gradients["last/linear#0"].zero > 0.5
    torch.manual_seed(0)
    scaled = fxamp.calibrate(Small(), X, loss=lambda out: (out * 1e-6).mean(), scale=2.0**24)
    assert scaled.gradients["last/linear#0"].zero < 0.2  # what the smallest inputs give


@pytest.mark.parametrize(("example", "as_path"), in_turns([True, False], [True, False]))
def test_a_conversion_to_fp16_keeps_fp32_what_comes_near_its_largest_number(
    example: bool, as_path: bool, tmp_path: Path
) -> None:
    model = Net()
    found = fxamp.calibrate(model, X, loss=mean_square)
    assert found.large == ("/mul#1", "/div#0")
    given: Any = found
    if as_path:
        given = tmp_path / "ranges.json"
        found.save(given)
        assert fxamp.Calibration.load(given) == found
    view = fxamp.convert(model, *[(X,)] * example, policy=FP16, calibration=given)
    view(X)
    colours = {d.key: d.colour for d in fxamp.plan_of(view).decisions}
    assert colours == {
        "first/linear#0": "float16", "/sigmoid#0": "float16", "/mul#0": "float16", "/mul#1": "float32",
        "/div#0": "float32", "last/linear#0": "float16",
    }  # fmt: skip
    bf16 = fxamp.convert(model, (X,), policy="O1,dtype=bf16", calibration=given)
    assert {d.colour for d in fxamp.plan_of(bf16).decisions} == {"bfloat16"}


def test_a_calibrated_conversion_does_not_overflow_where_another_does() -> None:
    model = Net(3e4)
    plain = fxamp.convert(model, (X,), policy="O2,dtype=fp16")
    found = fxamp.calibrate(model, batches=[X, X * 2], loss=mean_square)
    assert found.batches == 2
    assert fxamp.find_overflow(plain, X, loss=mean_square) is not None
    calibrated = fxamp.convert(model, (X,), policy="O2,dtype=fp16", calibration=found)
    assert fxamp.find_overflow(calibrated, X, loss=mean_square) is None


def test_a_graph_is_converted_with_the_calibration_of_its_model() -> None:
    model = Net()
    found = fxamp.calibrate(model, X, loss=mean_square)
    graph = fxamp.convert(program_of(model, (X,)), policy=FP16, calibration=found)
    assert {d.op for d in fxamp.plan_of(graph).decisions if d.colour == "float32"} == {"mul", "div"}


def test_a_calibration_of_other_parameters_is_stale(tmp_path: Path) -> None:
    model = Net()
    found = fxamp.calibrate(model, X, loss=mean_square)
    with pytest.raises(PlanError, match="this is the calibration of another model"):
        fxamp.convert(nn.Sequential(nn.Linear(8, 4)), policy=FP16, calibration=found)
    with torch.no_grad():
        model.last.bias[0] += 1
    with pytest.raises(PlanError, match=r"stale: 'last\.bias' has changed"):
        fxamp.convert(model, policy=FP16, calibration=found)
    with pytest.raises(PolicyError, match="not both"):
        fxamp.convert(model, plan=fxamp.plan(model, (X,)), calibration=found)
    path = tmp_path / "plan.json"
    fxamp.plan(model, (X,)).save(path)
    with pytest.raises(PlanError, match=r"plan\.json"):
        fxamp.convert(model, policy=FP16, calibration=path)
    with pytest.raises(PlanError, match="cannot read"):
        fxamp.Calibration.load(tmp_path / "none.json")


def test_a_real_model_is_as_before_and_a_batch_that_is_not_finite_is_counted() -> None:
    tf = pytest.importorskip("transformers")
    config = tf.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=100)
    ids = torch.randint(0, 100, (2, 8))
    batch = {"input_ids": ids, "labels": ids.clone()}
    model = tf.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # without one it warns, which breaks the graph: that takes long
    before = {name: value.clone() for name, value in model.state_dict().items()}
    view, random = fxamp.convert(model, kwargs=batch, policy=FP16), torch.get_rng_state()
    found = fxamp.calibrate(view, batches=[batch, batch])
    decided = {d.key for d in fxamp.plan_of(view).decisions}
    assert set(found.values) <= decided
    assert len(found.values) > 0.8 * len(decided)
    assert found.large == ()
    assert "transformer.h.0" in str(found)
    assert repr(found).startswith("<fxamp calibration: ")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    linear = nn.Linear(8, 4)
    bad = fxamp.calibrate(linear, batches=[X, X * torch.inf], loss=torch.mean)
    assert bad.values["/linear#0"].not_finite == 2  # the value, and the cast of the input
    assert bad.values["/linear#0"].largest is None
    assert fxamp.Calibration.from_json(bad.to_json()) == bad


class _Halves(torch.autograd.Function):
    """Leaves one of its gradients out."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def test_a_backward_may_leave_a_gradient_out() -> None:
    def leaves_out(self: Any, x: Tensor) -> Tensor:
        return self.last(_Halves.apply(self.a(x), self.b(x))).mean()  # type: ignore[no-untyped-call]

    model = Layers(leaves_out, a=nn.Linear(8, 8), b=nn.Linear(8, 8), last=nn.Linear(8, 1))
    found = fxamp.calibrate(model, torch.randn(4, 8))
    assert "a/linear#0" in found.gradients
    assert all(held.not_finite == 0 for held in found.gradients.values())


class Shared(nn.Module):
    """One weight, and so one cast, that two ops read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8) * 1e5)

    def forward(self, x: Tensor) -> Tensor:
        linear = nn.functional.linear
        return linear(x, self.weight) + linear(x * 2, self.weight)


def test_every_reader_of_a_cast_is_told_of_its_range() -> None:
    x = X * 1e-6
    found = fxamp.calibrate(Shared(), x, loss=torch.mean)
    assert {"/linear#0", "/linear#1"} <= set(found.large)
    view = fxamp.convert(Shared(), (x,), policy=FP16, calibration=found)
    assert fxamp.find_overflow(view, x, loss=torch.mean) is None


@pytest.mark.parametrize("changed", ["order", "signs"])
def test_a_checksum_knows_order_and_signs(changed: str) -> None:
    model = nn.Linear(8, 4)
    found = fxamp.calibrate(model, X, loss=torch.mean)
    with torch.no_grad():
        model.weight.copy_(model.weight.flip(1) if changed == "order" else -model.weight)
    with pytest.raises(PlanError, match="'weight' has changed"):
        found.refuse_stale(model)


def test_a_calibration_of_an_older_version_is_said_to_be_one() -> None:
    text = fxamp.calibrate(nn.Linear(8, 4), X, loss=torch.mean).to_json().replace('"version": 4', '"version": 3')
    with pytest.raises(PlanError, match="another version of fxamp wrote it"):
        fxamp.Calibration.from_json(text)


@pytest.mark.parametrize(
    ("field", "value"), [("values", {"a": {"largest": "x"}}), ("readers", {"a": [1]}), ("batches", "1"), ("scale", [])]
)
def test_a_calibration_of_other_values_is_refused(field: str, value: Any) -> None:
    data = json.loads(fxamp.calibrate(nn.Linear(8, 4), X, loss=torch.mean).to_json())
    with pytest.raises(PlanError, match="JSON, but not a calibration"):
        fxamp.Calibration.from_json(json.dumps({**data, field: value}))


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no file without an end")
def test_a_file_without_an_end_is_no_calibration() -> None:
    with pytest.raises(PlanError, match="longer than"):
        fxamp.Calibration.load("/dev/zero")


class Before(nn.Module):
    """The product with 500, which comes last, does not fit FP16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in "abc")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.b(self.a(x) * 2).sigmoid() * 300 * 500 / 9e4)
        return out


class LineAdded(Before):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.b(self.a(self.a(self.a(x) * 2) * 2) * 2).sigmoid() * 300 * 500 / 9e4)
        return out


class LineTakenOut(Before):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.b(self.a(x)).sigmoid() * 300 * 500 / 9e4)
        return out


class WrittenAnew(Before):
    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x) * 2).sigmoid() * 300
        out: Tensor = self.c(h.add(h, alpha=499) / 9e4)
        return out


class OtherNumbers(Before):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.b(self.a(x) * 500).sigmoid() * 300 * 2 / 9e4)
        return out


@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("edited", [Before, LineAdded, LineTakenOut, WrittenAnew, OtherNumbers])
def test_a_calibration_of_code_that_was_edited_since_is_refused(
    edited: type[Before], example: bool, tmp_path: Path
) -> None:
    x, path = torch.randn(4, 64), tmp_path / "ranges.json"
    fxamp.calibrate(Before(), x, loss=torch.mean, policies="O2,dtype=fp16").save(path)

    def convert() -> Any:
        view = fxamp.convert(edited(), *[(x,)] * example, policy="O2,dtype=fp16", calibration=path)
        return view(torch.randn(6, 64))

    if edited is Before:
        assert convert().isfinite().all()
        return
    with pytest.raises(PlanError, match=r"other code.*(/mul#|/div#).*Calibrate again"):
        convert()


def test_a_calibration_is_good_for_another_level_that_splits_the_loss_and_for_another_batch_size() -> None:
    model = Before()

    def loss(out: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out, torch.zeros(len(out), dtype=torch.long))

    found = fxamp.calibrate(model, torch.randn(4, 64), loss=loss, policies="O1,dtype=fp16")
    for level in ("O1", "O2"):
        view = fxamp.convert(model, (torch.randn(7, 64),), policy=f"{level},dtype=fp16", calibration=found)
        assert view(torch.randn(7, 64)).isfinite().all()
