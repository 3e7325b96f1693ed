"""A converted module stands in the model's place: same parameters, keys, calls, whatever is done with it."""

from __future__ import annotations

import gc
import importlib
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import fxamp
from tests.helpers import FRONT_ENDS, Two, assert_is_eager, assert_same, assert_untouched, example, fingerprint, o0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.m = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.m.weight
        self.unused = nn.Sequential(nn.Linear(2, 2))
        self.register_buffer("scale", torch.ones(6), persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("seen").add_(1)
        return self.tied(self.m(self.drop(self.norm(self.l(x))))) * self.get_buffer("scale")


@pytest.fixture(params=FRONT_ENDS)
def front_end(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def converted(model: Net, front_end: str) -> fxamp.ConvertedModule:
    return fxamp.convert(model, (example(),), policy="O1,dtype=bf16", capture=front_end)


def layer_norm(self: Any, x: Tensor) -> Tensor:
    return self.m(F.layer_norm(self.l(x), (6,)))


def test_keys_order_and_objects_are_the_models(model: Net, converted: Any) -> None:
    assert list(converted.state_dict()) == list(model.state_dict())
    for mine, theirs in (
        (converted.named_parameters(), model.named_parameters()),
        (converted.named_buffers(), model.named_buffers()),
    ):
        ours, originals = list(mine), list(theirs)
        assert [n for n, _ in ours] == [n for n, _ in originals]
        assert all(a is b for (_, a), (_, b) in zip(ours, originals, strict=True))
    assert converted.m.weight is converted.tied.weight
    assert isinstance(converted, torch.fx.GraphModule)
    converted.load_state_dict(model.state_dict())


def test_layers_of_torch_are_still_found_by_type(converted: nn.Module) -> None:
    assert [n for n, m in converted.named_modules() if isinstance(m, nn.BatchNorm1d)] == ["norm"]


def test_an_old_checkpoint_without_batch_counters_loads(model: Net, converted: nn.Module) -> None:
    state = model.state_dict()
    del state["norm.num_batches_tracked"]
    state._metadata["norm"] = {"version": 1}  # type: ignore[attr-defined]
    model.load_state_dict(state)
    converted.load_state_dict(state)


def test_conversion_leaves_the_model_alone(model: Net, front_end: str) -> None:
    model.l.weight.grad = torch.ones(6, 6)
    before = fingerprint(model)
    fxamp.convert(model, (example(),), capture=front_end)
    assert_untouched(model, before)
    with pytest.raises(fxamp.PolicyError):
        fxamp.convert(model, (example(),), policy="O1,ops.no_such_op=fp32", capture=front_end)
    assert_untouched(model, before)


def test_training_it_with_an_optimizer_built_before_trains_the_model(model: Net, front_end: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    converted = fxamp.convert(model, (example(),), capture=front_end)
    before = model.l.weight.detach().clone()
    converted(example()).sum().backward()
    optimizer.step()
    assert model.l.weight.grad is not None
    assert model.l.weight.grad.dtype == torch.float32
    assert not torch.equal(model.l.weight, before)


def test_moving_it_moves_the_model(model: Net, front_end: str) -> None:
    converted = o0(model, front_end=front_end)
    parameter = model.l.weight
    with pytest.warns(UserWarning, match=r"'l\.weight'.* is torch.float64 now"):
        converted.to(torch.float64)
    assert model.l.weight is parameter
    assert parameter.dtype == torch.float64
    assert model.norm.running_mean is converted.norm.running_mean
    assert model.get_buffer("scale").dtype == torch.float64
    converted.float()
    assert_is_eager(converted, model)
    state = {k: torch.full_like(v, 2) for k, v in model.state_dict().items()}
    converted.load_state_dict(state, assign=True)
    assert model.m.weight is converted.m.weight
    assert model.m.weight[0, 0].item() == 2


def test_parameters_that_lose_fp32_are_named(model: Net, converted: Any, recwarn: pytest.WarningsRecorder) -> None:
    converted.to("cpu").to(torch.float32).train().share_memory()
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"'l\.weight' of a converted Net was torch.float32 and is torch.float16 now"):
        converted.half()
    assert model.l.weight.dtype == torch.float16
    converted.float()
    assert not recwarn.list


def test_attributes_of_the_original_say_where_they_are(converted: Any) -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'generate'.*forward of Net.*read 'generate' from the"):
        converted.generate(3)


def test_its_code_reads_parameters_without_asking_getattr(
    converted: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    original = nn.Module.__getattr__

    def counted(self: nn.Module, name: str) -> Any:
        asked.append(name)
        return original(self, name)

    converted(example())
    monkeypatch.setattr(nn.Module, "__getattr__", counted)
    converted(example())
    assert not {"weight", "bias", "l", "m"} & set(asked)


def test_a_parametrization_registered_after_conversion_counts(converted: Any) -> None:
    class Zero(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 0

    nn.utils.parametrize.register_parametrization(converted.l, "weight", Zero())
    one, other = converted.eval()(example()), converted(2 * example())
    assert torch.equal(one, other)  # the input no longer counts


def test_its_code_runs_without_fxamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = fxamp.convert(Two(), (example(),), policy="O1,dtype=bf16", capture="export")
    converted.to_folder(tmp_path / "written", "Written")
    monkeypatch.syspath_prepend(tmp_path)
    written = importlib.import_module("written").Written()
    assert torch.equal(written(example())[0], converted(example()))
    assert "fxamp" not in converted.code


def test_hooks_on_it_get_what_the_user_gave(converted: nn.Module) -> None:
    x = example()
    got: list[Any] = []
    converted.register_forward_pre_hook(lambda _, args, kwargs: got.append((args, kwargs)), with_kwargs=True)
    converted.register_forward_hook(lambda _, args, output: got.append(output))
    output = converted(x=x)
    assert got[0] == ((), {"x": x})
    assert got[1] is output


def test_ambient_autocast_changes_nothing(converted: fxamp.ConvertedModule) -> None:
    converted.eval()
    expected = converted(example())
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert_same(converted(example()), expected)
            with torch.autocast("cpu", enabled=False):
                assert_same(converted(example()), expected)
            with torch.autocast("cpu", dtype=torch.float16):
                assert_same(converted(example()), expected)
            assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_an_error_inside_a_region_leaves_grad_mode_and_autocast_as_they_were() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.l(x) @ y
        return self.m(z.float())

    converted = o0(Two(forward), (example(), torch.ones(6, 6)))
    spec = converted.call_spec
    converted.call_spec = replace(spec, leaves=tuple(replace(leaf, static=()) for leaf in spec.leaves))
    with pytest.raises(RuntimeError, match=r"shape|size"):
        converted(example(), torch.ones(7, 6))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles_without_a_graph_break(model: Net, converted: nn.Module, backend: str) -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo's own, about APIs that it calls itself
        converted.eval()
        compiled = torch.compile(converted, fullgraph=True, backend=backend)
        for rows in (4, 7):
            assert_same(compiled(example(rows)), converted(example(rows)))
        compiled(example()).sum().backward()
    assert model.l.weight.grad is not None


def test_it_can_be_exported(converted: fxamp.ConvertedModule) -> None:
    converted.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(converted, (example(),), strict=False)
    assert "autocast" not in str(program.graph)
    assert_same(program.module()(example()), converted(example()))


def test_functional_call_feeds_the_casts(converted: nn.Module) -> None:
    converted.eval()
    doubled = {n: p * 2 for n, p in converted.named_parameters()}
    before = converted(example())
    got = functional_call(converted, doubled, (example(),))
    assert not torch.equal(got, before)
    assert_same(converted(example()), before)


@pytest.mark.parametrize(("policy", "tolerance"), [("O0", 1e-6), ("O1,dtype=bf16", 2**-5)])
def test_per_sample_gradients(front_end: str, policy: str, tolerance: float) -> None:
    converted = fxamp.convert(Two(layer_norm), (example(),), policy=policy, capture=front_end)
    parameters: dict[str, Tensor] = dict(converted.named_parameters())

    def loss(values: dict[str, Tensor], row: Tensor) -> Any:
        return functional_call(converted, values, (row[None],)).square().sum()

    together = vmap(grad(loss), in_dims=(None, 0))(parameters, example())
    for i, row in enumerate(example()):
        for name, value in grad(loss)(parameters, row).items():
            assert (together[name][i] - value).norm() <= tolerance * value.norm()


def test_fp16_training_without_a_scaler_warns_once(front_end: str) -> None:
    gc.collect()  # scalers of other tests
    converted = fxamp.convert(Two(), (example(),), policy="O1,dtype=fp16", capture=front_end)
    with pytest.warns(UserWarning, match="loss scale underflow"):
        converted(example()).sum().backward()
    converted(example()).sum().backward()  # warnings are errors here


@pytest.mark.parametrize("policy", ["O1,dtype=bf16", "O0,dtype=fp16"])
def test_no_warning_where_nothing_can_underflow(policy: str) -> None:
    fxamp.convert(Two(), (example(),), policy=policy)(example()).sum().backward()  # warnings are errors here


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, fxamp.LossScaler])
def test_no_warning_when_a_scaler_has_scaled(kind: Any) -> None:
    scaler = kind("cpu")
    converted = fxamp.convert(Two(), (example(),), policy="O1,dtype=fp16")
    scaler.scale(converted(example()).sum()).backward()


def test_no_warning_in_eval_mode() -> None:
    converted = fxamp.convert(Two(), (example(),), policy="O1,dtype=fp16").eval()
    converted(example()).sum().backward()


def test_threads_share_it(converted: nn.Module) -> None:
    converted.eval()
    expected = converted(example())
    got: list[Any] = []
    threads = [threading.Thread(target=lambda: got.append(converted(example()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4
    for output in got:
        assert_same(output, expected)
