"""A device is one row: with it fxamp plans for the device, whether it is here or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxamp
from passes._torch import autocast_registrations
from passes.contract.devices import DEVICES, Device
from passes.contract.policy import Policy
from passes.ops.rules import LOW, PROMOTE, RULES, lookup
from tests.support.exported import plan_of
from tests.support.helpers import Layers


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda d: d.name)
def test_torch_has_autocast_for_each_device_by_that_key(device: Device) -> None:
    assert device.lists in DEVICES
    assert torch.get_autocast_dtype(device.name) in (torch.float16, torch.bfloat16)
    assert torch._C._dispatch_get_registrations_for_dispatch_key(device.autocast)


@pytest.mark.parametrize("device", DEVICES)
def test_a_policy_names_any_device_and_a_plan_for_it_is_made_wherever_one_is(device: str) -> None:
    assert str(Policy.parse(f"O1,device={device}")) == f"O1,device={device}"
    plan = plan_of(nn.Sequential(nn.Linear(4, 4), nn.Softmax(1)), torch.randn(2, 4), f"O1,device={device}")
    linear, softmax = plan.decisions
    low = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    assert (linear.colour, softmax.colour) == (low, low if DEVICES[device].lists == "cpu" else "float32")


def test_an_xpu_has_the_lists_of_cuda_but_for_the_kernels_of_its_vendor() -> None:
    kinds = {name: (lookup(name, "xpu")[1], lookup(name, "cuda")[1]) for name in RULES}
    unlike = {name: both for name, both in kinds.items() if both[0] != both[1]}
    of_cuda_builds = {"_cudnn_rnn"} & {name.removeprefix("aten::") for name in autocast_registrations("cuda")}
    of_vendor = {"cudnn_convolution", "cudnn_convolution_transpose", *of_cuda_builds}
    assert {name: both for name, both in unlike.items() if "cudnn" in name} == dict.fromkeys(of_vendor, (PROMOTE, LOW))
    # What torch has put on CUDA's list lately, it may not have put on that of another device yet.
    assert not {name for name in unlike.keys() - of_vendor if not RULES[name].since}


def test_mps_has_the_kinds_of_cuda_but_for_what_torch_does_not_register_for_it() -> None:
    registered = {n.removeprefix("aten::").partition(".")[0] for n in autocast_registrations("mps")}
    unlike = {name: kind for name in RULES if (kind := lookup(name, "mps")[1]) != lookup(name, "cuda")[1]}
    own = DEVICES["mps"].kinds
    assert own.items() <= {name: lookup(name, "mps")[1] for name in RULES}.items()
    assert {kind for name, kind in unlike.items() if name not in own} == {PROMOTE}
    assert {name for name in unlike if name in registered} == {"_mps_convolution", "batch_norm"}


@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize(("device", "dtype"), [("xpu", "bfloat16"), ("xpu", "float16"), ("cuda", "float16")])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_runs_in_fp16_only_where_cudnn_runs_it(device: str, dtype: str, layer: Any) -> None:
    asked = "bfloat16" if device == "cuda" else dtype
    plan = plan_of(layer(4, 4), torch.randn(3, 2, 4), f"O1,device={device},dtype={asked}")
    colours = {d.colour for d in plan.decisions if d.op in ("lstm", "gru", "rnn_tanh")}
    assert colours == {dtype}


def test_a_device_for_which_torch_has_no_lists_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "hpu", replace(DEVICES["xpu"], name="hpu", autocast="AutocastHPU"))
    with pytest.raises(fxamp.PolicyError, match=r"device=hpu: torch .* has no autocast lists for this device"):
        plan_of(nn.Linear(4, 4), torch.randn(2, 4), "O1,device=hpu,dtype=bf16")


def test_the_row_of_the_cpu_is_of_what_is_here() -> None:
    assert DEVICES["cpu"].is_here()
    assert DEVICES["cpu"].capability() == torch.backends.cpu.get_cpu_capability()


def test_what_runs_on_another_device_than_the_policys_is_cast_as_autocast_does_which_leaves_it() -> None:
    def moving(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        moved, wide = self.layer(x).to("meta"), x.to("meta")
        return moved, moved @ moved, wide @ wide, F.mse_loss(moved, moved), moved + wide

    model, x = Layers(moving, layer=nn.Linear(4, 4)), torch.randn(4, 4)
    view = fxamp.convert(model, policy="O1,dtype=bf16,output_dtype=autocast")
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    assert [t.dtype for t in view(x)] == [t.dtype for t in expected] == [torch.bfloat16] * 2 + [
        torch.float32, torch.bfloat16, torch.float32
    ]  # fmt: skip
    assert not fxamp.plan_of(view).deviations
