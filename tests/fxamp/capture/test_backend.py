"""The torch.compile backend: every model and construct that Dynamo runs, with the values of autocast."""

from __future__ import annotations

import copy
import gc
import pickle
import shutil
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from tests.support.front_ends import FRESH, compiled, equal, tensors
from tests.support.helpers import Layers, Two, example
from tests.support.zoo import ZOO, Zoo

pytestmark = FRESH
BF16, F32 = torch.bfloat16, torch.float32
# Dynamo leaves recurrent layers to Python, so nothing of this one is captured.
CAPTURED = [
    pytest.param(z, id=z.name, marks=() if z.name in ("lenet5", "graph_conv") else pytest.mark.matrix)
    for z in ZOO if z.name != "lstm_tagger"
]  # fmt: skip
UNCHANGED = [p if p.id == "lenet5" else pytest.param(*p.values, id=p.id, marks=pytest.mark.matrix) for p in CAPTURED]


@pytest.mark.parametrize("zoo", CAPTURED)
def test_o1_gives_the_values_of_autocast(zoo: Zoo) -> None:
    model = zoo.build().eval()
    args, kwargs = zoo.inputs(3)
    module = compiled(model)
    with torch.no_grad():
        got = module(*args, **kwargs)
        plain = model(*args, **kwargs)
        with torch.autocast("cpu"):
            expected = model(*args, **kwargs)
    assert equal(got, expected)
    assert [t.dtype for t in tensors(got)] == [t.dtype for t in tensors(plain)]
    assert any(d.colour == "bfloat16" for d in fxamp.plan_of(module).decisions)
    assert fxamp.plan_of(module).capture == "dynamo"


@pytest.mark.parametrize("zoo", UNCHANGED)
def test_o0_changes_nothing(zoo: Zoo) -> None:
    model = zoo.build().train()
    args, kwargs = zoo.inputs(3)
    kept = copy.deepcopy(model.state_dict())

    def run(module: Any) -> tuple[Any, list[Any], dict[str, Tensor]]:
        model.load_state_dict(kept)
        model.zero_grad()
        torch.manual_seed(0)
        output = module(*args, **kwargs)
        sum(t.float().sum() for t in tensors(output) if t.requires_grad).backward()  # type: ignore[union-attr]
        return output, [p.grad for p in model.parameters()], {k: b.clone() for k, b in model.named_buffers()}

    expected, gradients, buffers = run(torch.compile(model, backend="eager"))  # which can differ from eager
    got, ours, after = run(compiled(model, "O0"))
    assert equal(got, expected)
    assert all(torch.equal(after[k], b) for k, b in buffers.items())
    for a, b in zip(ours, gradients, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.matrix)])
def test_inner_backends_train(inner: str) -> None:
    if inner == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    model = Two()
    module, x = compiled(model, inner=inner), example()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(5):
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert {d.colour for d in fxamp.plan_of(module).decisions} == {"bfloat16"}


# The backend as a value, and the ways to name it.


def test_a_backend_is_a_value() -> None:
    a, b = fxamp.backend("O1", "eager", options={"x": 1}), fxamp.backend("O1", "eager", options={"x": 1})
    assert a == b == copy.deepcopy(a) == pickle.loads(pickle.dumps(a))
    assert hash(a) == hash(b)
    assert a != fxamp.backend("O2", "eager", options={"x": 1})


def test_an_equal_backend_compiles_nothing_anew() -> None:
    model, x = Two(), example()
    seen: list[Any] = []

    def noting(gm: Any, inputs: Any) -> Any:
        seen.append(gm)
        return gm

    for _ in range(3):
        torch.compile(model, backend=fxamp.backend("O1", noting))(x)
    assert len(seen) == 1


def test_by_entry_point_with_options() -> None:
    model, x = Two(), example()
    options: Any = {"policy": "O1,modules.m=fp32", "backend": "eager"}
    module: Any = torch.compile(model, backend="fxamp", options=options)
    module(x)
    colours = {d.module_path: d.colour for d in fxamp.plan_of(module).decisions}
    assert colours == {"l": "bfloat16", "m": "float32"}


def test_the_plan_of_a_model_that_was_compiled_twice_is_that_of_the_last_policy() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(3, 8)
    for policy, colour in [("O1,dtype=bf16", "bfloat16"), ("O0", "float32")]:
        torch._dynamo.reset()
        module: Any = torch.compile(model, backend=fxamp.backend(policy, "eager"))
        module(x)
        assert {d.colour for d in fxamp.plan_of(module).decisions} == {colour}


def test_in_place_keeps_class_and_keys() -> None:
    model, x = Two(), example()
    keys = list(model.state_dict())
    model.compile(backend="fxamp", options={"policy": "O1", "backend": "eager"})
    assert type(model) is Two
    assert list(model.state_dict()) == keys
    with pytest.raises(fxamp.CaptureError, match="first call"):
        fxamp.plan_of(model)
    model(x)
    assert [d.colour for d in fxamp.plan_of(model).decisions] == ["bfloat16", "bfloat16"]


def test_in_place_on_a_class_of_torch_nn_is_captured_or_it_is_said() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    model.compile(backend="fxamp", options={"backend": "eager"})
    model(example())
    for ask in (fxamp.graphs, fxamp.plan_of, fxamp.report):
        if torch.__version__ >= "2.14":
            assert ask(model)
            continue
        with pytest.raises(fxamp.FxampError, match=r"Sequential, captures nothing. Use compiled = torch\.compile"):
            ask(model)
    module = fxamp.compile(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), backend="eager")
    module(example())
    assert len(fxamp.graphs(module)) == 1


def test_wrong_backends_are_named() -> None:
    with pytest.raises(fxamp.PolicyError, match=r"no torch.compile backend 'inducter'; the nearest name is 'inductor'"):
        fxamp.backend("O1", "inducter")
    with pytest.raises(fxamp.PolicyError, match="cannot be fxamp itself"):
        fxamp.backend("O1", "fxamp")
    with pytest.raises(fxamp.PolicyError, match="a name or a callable, not int"):
        fxamp.backend("O1", 3)  # type: ignore[arg-type]
    with pytest.raises(fxamp.PolicyError, match="measured"):
        fxamp.backend("O2,cost=measured")
    with pytest.raises(fxamp.NotAModuleError, match="not function"):
        fxamp.compile(example)  # type: ignore[arg-type]
    module: Any = torch.compile(Two(), backend="fxamp", options={"policy": "O9"})
    with pytest.raises(Exception, match="O9"):
        module(example())


def test_options_of_the_inner_backend_reach_it() -> None:
    seen: dict[str, Any] = {}

    def noting(gm: Any, inputs: Any, **given: Any) -> Any:
        seen.update(given)
        return gm

    compiled(Two(), inner=noting, mode="max", options={"depth": 3})(example())
    assert seen == {"mode": "max", "options": {"depth": 3}}


def test_nothing_but_torch_ops_in_what_the_inner_backend_gets() -> None:
    def f(self: Two, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.l(x)
        with torch.autocast("cpu", enabled=False):
            y = self.m(y.float())
        return self.m(y + x)

    module = compiled(Two(f))
    module(example())
    targets = [n.target for n in fxamp.graphs(module)[0].graph.nodes if n.op == "call_function"]
    assert not [t for t in targets if "autocast" in str(t)]
    assert all(getattr(t, "__module__", "").startswith(("torch", "_operator")) for t in targets)


# What Dynamo does goes on working.


def test_a_branch_on_data_between_two_halves() -> None:
    def f(self: Two, x: Tensor) -> Tensor:
        h = self.l(x)
        if h.sum() > 0:
            return self.m(h)
        return self.m(-h) * 2

    model = Two(f)
    nn.init.zeros_(model.l.bias)  # so that the sum has the sign of the input
    module = compiled(model)
    for x in (example(), -example()):
        with torch.autocast("cpu"):
            expected = model(x)
        assert equal(module(x), expected)
    signs = [bool(model.l(x).sum() > 0) for x in (example(), -example())]
    assert len(set(signs)) == 2
    plan = fxamp.plan_of(module)
    linears = {(d.module_path, d.colour) for d in plan.decisions if d.op == "linear"}
    assert linears == {("l", "bfloat16"), ("m", "bfloat16")}
    assert len(fxamp.graphs(module)) == 3
    report = str(fxamp.report(module))
    assert "hold 4 of 4 parameters (100% of their elements)" in report
    assert "graph break at test_backend.py:" in report
    assert {d.graph for d in plan.decisions} == {0, 1, 2}


def test_graphs_inside_submodules_have_paths_from_the_root() -> None:
    def f(self: Any, x: Tensor) -> Any:
        return self.m(self.inner(x))

    def g(self: Two, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.l(x)

    module = compiled(Two(f, inner=Two(g)))
    module(example())
    assert {d.module_path for d in fxamp.plan_of(module).decisions} == {"inner.l", "m"}
    assert "inner.l/linear#0" in [d.key for d in fxamp.plan_of(module).decisions]


def test_sizes_modes_and_fullgraph() -> None:
    def f(self: Two, x: Tensor) -> Tensor:
        return self.m(F.dropout(self.l(x), 0.5, self.training))

    model = Two(f)
    module = compiled(model, fullgraph=True, dynamic=True)
    for rows in (4, 5, 7):
        model.eval()
        with torch.autocast("cpu"):
            expected = model(example(rows))
        assert equal(module(example(rows)), expected)
        model.train()
        assert not equal(module(example(rows)), expected)
    assert "2 graphs" in repr(module)  # one in each mode, for every size


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_fp16_training_without_a_scaler_warns_once(inner: str) -> None:
    gc.collect()  # scalers of other tests
    module = compiled(Two(), "O1,dtype=fp16", inner)
    with pytest.warns(UserWarning, match="loss scale underflow"):
        module(example()).sum().backward()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "FP16 gradients")
        module(example()).sum().backward()


@pytest.mark.parametrize("module", [compiled, lambda m, policy: fxamp.convert(m, example(), policy=policy)])
def test_a_disabled_scaler_is_none(module: Any) -> None:
    gc.collect()  # scalers of other tests
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.warns(UserWarning, match="loss scale underflow"):
        module(Two(), "O1,dtype=fp16")(example()).sum().backward()
    assert not disabled.is_enabled()


@pytest.mark.filterwarnings("error:FP16 gradients")
def test_no_warning_when_a_scaler_has_scaled_or_in_bf16() -> None:
    compiled(Two(), "O1,dtype=bf16")(example()).sum().backward()
    scaler = fxamp.LossScaler("cpu")
    scaler.scale(compiled(Two(), "O1,dtype=fp16")(example()).sum()).backward()


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_checkpointed_dropout_is_recomputed_with_its_mask(inner: str) -> None:
    def f(self: Two, x: Tensor) -> Any:
        return checkpoint(lambda t: F.dropout(self.l(t), 0.5), x, use_reentrant=False)

    model = Two(f)
    kept = compiled(model, "O0", inner)(example())
    kept.sum().backward()
    assert torch.equal(model.l.bias.grad, 2.0 * (kept != 0).sum(0))  # type: ignore[arg-type]


def test_a_misspelt_option_is_named() -> None:
    module = torch.compile(Two(), backend="fxamp", options={"polcy": "O1"})
    with pytest.raises(Exception, match="no option 'polcy'; the nearest name is 'policy'"):
        module(example())


# Ambient autocast chooses the dtype and nothing else.


@pytest.mark.default_case(dtype=torch.float16)
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ambient_autocast_as_a_state(inner: str, dtype: torch.dtype) -> None:
    model = Two()
    module = compiled(model, "O1,modules.m=fp32", inner)
    with torch.autocast("cpu", dtype=dtype):
        got = module(example())
        low = model.l(example())
    assert fxamp.plan_of(module).policy.dtype == dtype
    assert got.dtype == F32
    assert torch.equal(got, model.m(low.float()))  # what the policy keeps FP32 is FP32


def test_data_of_a_low_value_stays_low_under_ambient_autocast() -> None:
    model, x = Two(lambda self, x: (self.l(x).data, self.m(x).data + x)), example()
    module: Any = torch.compile(model, backend=fxamp.backend("O1", "eager"))
    with torch.autocast("cpu"):
        expected, got = model(x), module(x)
    assert [t.dtype for t in got] == [t.dtype for t in expected] == [BF16, F32]
    assert equal(got, expected)
    assert not fxamp.plan_of(module).deviations


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_ambient_autocast_as_a_region_round_the_graph(inner: str) -> None:
    def f(self: Two, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            y = self.m(self.l(x))
        return y.float()

    model = Two(f)
    assert torch.equal(compiled(model, "O1", inner)(example()), model(example()))
    module: Any = torch.compile(model, backend=fxamp.backend("O1", inner))
    assert torch.equal(module(example()), model(example()))
    assert fxamp.plan_of(module).policy.dtype == torch.float16


def test_a_region_inside_the_model_is_a_pin() -> None:
    def f(self: Two, x: Tensor) -> Tensor:
        y = self.l(x)
        with torch.autocast("cpu", enabled=False):
            return self.m(y.float())

    module = compiled(Two(f))
    with torch.autocast("cpu"):
        module(example())
    colours = {d.module_path: (d.colour, d.code) for d in fxamp.plan_of(module).decisions if d.op == "linear"}
    assert colours == {"l": ("bfloat16", "low"), "m": ("float32", "autocast_region")}


def test_a_composite_in_a_region_runs_where_the_region_alone_made_its_operands_one() -> None:
    def f(self: Two, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.einsum("...i,ij->...j", x.bfloat16(), self.l.weight)

    model = Two(f)
    got = compiled(model)(example())
    assert torch.allclose(got.float(), model(example()).float(), rtol=0.02, atol=0.02)


def test_of_two_low_dtypes_an_output_has_autocasts() -> None:
    def f(self: Two, x: Tensor) -> Tensor:
        return x @ x.mT

    model, x = Two(f).eval(), example().half()
    module: Any = torch.compile(model, backend=fxamp.backend("O1,dtype=bf16", "eager"))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), model(x))
        assert module(x).dtype == BF16


# Bad input.


def test_torchs_own_error_is_not_hidden() -> None:
    def f(self: Two, x: Tensor) -> Any:
        torch._dynamo.graph_break()
        return self.m(self.l(x))

    with pytest.raises(fxamp.CaptureError, match="graph_break"):
        compiled(Two(f), fullgraph=True)(example())


# Training.


@pytest.mark.parametrize("way", ["compile", "in place"])
def test_a_trainstep_chooses_its_scaler_at_the_first_call(way: str) -> None:
    model, x = Two(), example()
    module: Any = model
    if way == "compile":
        module = compiled(model, "O1,dtype=fp16")
    else:
        model.compile(backend="fxamp", options={"policy": "O1,dtype=fp16", "backend": "eager"})
    step = fxamp.TrainStep(module, lambda out: out.square().mean(), torch.optim.SGD(model.parameters(), 0.1))
    step.load_state_dict({**step.state_dict(), "scaler": fxamp.LossScaler(init_scale=8.0).state_dict()})
    results = [step(x) for _ in range(4)]
    assert [r.scale for r in results] == [8.0] * 4
    assert step.scaler.is_enabled()
    assert all(r.stepped for r in results)
    assert results[-1].loss < results[0].loss


def test_an_empty_batch_that_fake_kernels_cannot_run() -> None:
    upsampled = Layers(lambda m, x: F.interpolate(m.conv(x), scale_factor=2), conv=nn.Conv2d(3, 8, 3))
    module, empty = compiled(upsampled), torch.randn(0, 3, 12, 12)
    assert module(empty).shape == (0, 8, 20, 20)
