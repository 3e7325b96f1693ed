"""A converted module stands in the model's place: same parameters, keys, calls, whatever is done with it."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import inspect
import pickle
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
from tests.support.helpers import (
    FRONT_ENDS,
    Two,
    assert_is_eager,
    assert_same,
    assert_untouched,
    convert_fixed,
    example,
    fingerprint,
    o0,
)


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


@functools.cache
def made(front_end: str, dynamic_shapes: str | None) -> tuple[Net, fxamp.ConvertedModule]:
    """Return a model and what was converted of it, to be copied together."""
    torch.manual_seed(0)
    model = Net()
    return model, fxamp.convert(
        model, (example(),), policy="O1,dtype=bf16", capture=front_end, dynamic_shapes=dynamic_shapes
    )


@pytest.fixture
def both(front_end: str) -> tuple[Net, fxamp.ConvertedModule]:
    return copy.deepcopy(made(front_end, None))


@pytest.fixture
def model(both: tuple[Net, fxamp.ConvertedModule]) -> Net:
    return both[0]


@pytest.fixture
def converted(both: tuple[Net, fxamp.ConvertedModule]) -> fxamp.ConvertedModule:
    return both[1]


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
    convert_fixed(model, (example(),), capture=front_end)
    assert_untouched(model, before)
    with pytest.raises(fxamp.PolicyError):
        convert_fixed(model, (example(),), policy="O1,ops.no_such_op=fp32", capture=front_end)
    assert_untouched(model, before)


def test_training_it_with_an_optimizer_built_before_trains_the_model(model: Net, front_end: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    converted = convert_fixed(model, (example(),), capture=front_end)
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


@pytest.mark.parametrize(("policy", "said"), [("O1,device=cuda", 1), ("O0,device=cuda", 0), ("O1", 0)])
def test_a_call_on_another_device_than_that_of_the_plan_is_named_once(
    policy: str, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    converted = fxamp.convert(nn.Linear(4, 4), (torch.randn(2, 4),), policy=policy, dynamic_shapes=None, check=False)
    for _ in range(2):
        converted(torch.randn(2, 4))
    assert caplog.text.count("Linear was converted for 'cuda' and runs on 'cpu'") == said


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
    converted = convert_fixed(Two(), (example(),), policy="O1,dtype=bf16", capture="export")
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


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.matrix), "aot_eager"])
def test_it_compiles_without_a_graph_break(front_end: str, backend: str) -> None:
    torch._dynamo.reset()
    model, converted = copy.deepcopy(made(front_end, "auto"))
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
    converted = fxamp.convert(Two(layer_norm), (example(),), policy=policy, capture=front_end)  # and for one row
    parameters: dict[str, Tensor] = dict(converted.named_parameters())

    def loss(values: dict[str, Tensor], row: Tensor) -> Any:
        return functional_call(converted, values, (row[None],)).square().sum()

    together = vmap(grad(loss), in_dims=(None, 0))(parameters, example())
    for i, row in enumerate(example()):
        for name, value in grad(loss)(parameters, row).items():
            assert (together[name][i] - value).norm() <= tolerance * value.norm()


def test_fp16_training_without_a_scaler_warns_once(front_end: str) -> None:
    gc.collect()  # scalers of other tests
    converted = convert_fixed(Two(), (example(),), policy="O1,dtype=fp16", capture=front_end)
    with pytest.warns(UserWarning, match="loss scale underflow"):
        converted(example()).sum().backward()
    converted(example()).sum().backward()  # warnings are errors here


@pytest.mark.parametrize("policy", ["O1,dtype=bf16", "O0,dtype=fp16"])
def test_no_warning_where_nothing_can_underflow(policy: str) -> None:
    convert_fixed(Two(), (example(),), policy=policy)(example()).sum().backward()  # warnings are errors here


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, fxamp.LossScaler])
def test_no_warning_when_a_scaler_has_scaled(kind: Any) -> None:
    scaler = kind("cpu")
    converted = convert_fixed(Two(), (example(),), policy="O1,dtype=fp16")
    scaler.scale(converted(example()).sum()).backward()


def test_no_warning_in_eval_mode() -> None:
    converted = convert_fixed(Two(), (example(),), policy="O1,dtype=fp16").eval()
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


NAMES = ("graph", "code", "plan", "meta", "variants", "call_spec")


class Named(nn.Module):
    """Children, and a parameter and a buffer of its own, are called like attributes of a GraphModule or of ours."""

    device_type: Tensor
    missing: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.add_module(name, nn.Linear(6, 6))
        self.add_module("original", nn.Sequential(nn.BatchNorm1d(6), nn.Dropout()))
        self.add_module("functions", nn.Dropout())
        self.register_parameter("device_type", nn.Parameter(torch.ones(6)))
        self.register_buffer("missing", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x * self.device_type + self.missing


def test_children_that_are_called_like_attributes_of_ours_are_kept(front_end: str) -> None:
    model = Named()
    converted = o0(model, front_end=front_end)
    assert_is_eager(converted, model)
    assert list(converted.state_dict()) == list(model.state_dict())
    copies = [copy.deepcopy(converted), copy.copy(converted), pickle.loads(pickle.dumps(converted))]
    for module in (converted, *copies):
        assert isinstance(module.graph, torch.fx.Graph)
        assert isinstance(module.plan, fxamp.Plan)
        assert isinstance(module.get_submodule("graph"), nn.Linear)
        assert isinstance(module.get_submodule("original.0"), nn.BatchNorm1d)
        assert module.get_parameter("plan.weight").shape == (6, 6)
        module.load_state_dict(model.state_dict())
        assert_same(module.eval()(example()), model.eval()(example()))
    with torch.no_grad(), fxamp.frozen(convert_fixed(model, (example(),), policy="O1,dtype=bf16")) as frozen:
        frozen(example())


class Block(nn.Sequential):
    """A container of the user's with a forward of its own."""

    def forward(self, x: Any) -> Any:
        return x + self[1](self[0](x))


class Contained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), Block(nn.Linear(6, 6), nn.ReLU())])
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
        self.scales = nn.ParameterList([torch.ones(6), torch.ones(6)])
        self.named = nn.ParameterDict({"shift": torch.zeros(6)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.heads["a"](x) * self.scales[0] + self.named["shift"]


def test_containers_keep_their_class_and_their_indexing(front_end: str) -> None:
    model = Contained()
    for converted in (o0(model, front_end=front_end), copy.deepcopy(o0(model, front_end=front_end))):
        module: Any = converted
        assert [type(m) for m in (module.layers, module.heads)] == [nn.ModuleList, nn.ModuleDict]
        assert len(module.layers) == 2
        assert [type(m) for m in module.layers] == [nn.Linear, nn.Sequential]
        assert isinstance(module.layers[1][0], nn.Linear)
        assert list(module.heads) == ["a", "b"]
        assert module.heads["b"].weight.shape == (6, 6)
        assert [p.shape for p in module.scales] == [(6,), (6,)]
        assert module.named["shift"] is module.named.shift
    assert o0(model).layers[0].weight is model.layers[0].weight
    with pytest.raises(fxamp.CaptureError, match="not called by itself"):
        o0(model).layers[1](example())


def test_a_sequence_is_indexed_as_the_model_is(front_end: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    for module in (o0(model, front_end=front_end), copy.deepcopy(o0(model, front_end=front_end))):
        converted: Any = module
        assert len(converted) == 3
        assert [type(m) for m in converted] == [nn.Linear, nn.ReLU, nn.Linear]
        assert isinstance(converted[-1], nn.Linear)
        assert [type(m) for m in converted[1:]] == [nn.ReLU, nn.Linear]
    assert not hasattr(o0(Two()), "__len__")


def test_forward_takes_what_the_models_forward_takes(front_end: str) -> None:
    def forward(self: Any, x: Tensor, scale: float = 2.0, *, shift: float = 0.0) -> Tensor:
        return self.l(x) * scale + shift

    model = Two(forward)
    converted = o0(model, front_end=front_end)
    for module in (converted, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert str(inspect.signature(module.forward)) == "(x, scale=2.0, *, shift=0.0)"
    variadic = Two(lambda self, x, *args, **kwargs: self.l(x))
    assert str(inspect.signature(o0(variadic).forward)) == "(x, *args, **kwargs)"


def test_it_can_be_exported_with_dynamic_shapes(front_end: str) -> None:
    converted = copy.deepcopy(made(front_end, "auto"))[1].eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = {"x": {0: torch.export.Dim.DYNAMIC}}
        program = torch.export.export(converted, (example(),), dynamic_shapes=rows, strict=False)
    assert_same(program.module()(example(9)), converted(example(9)))


def test_copies_have_the_hooks_and_attributes_of_the_user(converted: Any) -> None:
    converted.eval()
    converted.note, converted.history = "mine", [1]
    converted.register_forward_hook(hook_with_kwargs, with_kwargs=True, always_call=True)
    converted.register_forward_pre_hook(pre_hook_with_kwargs, with_kwargs=True)
    expected = converted(example())
    for copied in (copy.deepcopy(converted), copy.copy(converted), pickle.loads(pickle.dumps(converted))):
        assert (copied.note, copied.history) == ("mine", [1])
        assert_same(copied(example()), expected)
        assert copied._forward_hooks_always_called
    copied = copy.deepcopy(converted)
    copied.history.append(2)
    assert converted.history == [1]


def hook_with_kwargs(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    return output * 2


def pre_hook_with_kwargs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tuple(a * 3 for a in args), kwargs
