"""What a graph has as a constant is compared at every call: a change is followed, or refused by name, never ignored."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

import fxamp
from fxamp.capture.model.snapshot import untouched
from tests.support.helpers import FRONT_ENDS, Two, assert_is_eager, assert_same, example, o0


class Config:
    times = 1.0

    def __init__(self) -> None:
        self.gain, self.unread = 3.0, 1.0


class Net(nn.Module):
    rate = 1.0

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.last = nn.LayerNorm(6)
        self.layers = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh())
        self.scale, self.gains, self.config = 2.0, [1.0, 2.0], Config()
        self.act: Callable[[Tensor], Tensor] = F.relu
        self.unread, self.calls = 1.0, 0
        if shared:  # then torch.export runs the model with proxies of all modules
            self.tail = self.last

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.layers(self.drop(self.norm(self.act(self.l(x)))))
        gain: float = self.config.gain
        return self.last(x) * self.scale * self.gains[1] * gain * self.config.times * self.rate


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module", params=[*((end, False) for end in FRONT_ENDS), ("export", True)], ids=str)
def both(request: pytest.FixtureRequest) -> tuple[Net, Any]:
    """A model and what was made of it, which every test leaves as they were."""
    front_end, shared = request.param
    model = Net(shared)
    return model, o0(model, front_end=front_end)


@contextlib.contextmanager
def left_alone(*modules: nn.Module) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(untouched(module))
        yield


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


OF_BOTH: dict[str, Callable[[Any], Any]] = {
    "norm.momentum": lambda m: setattr(m.norm, "momentum", 0.5),
    "drop.p": lambda m: setattr(m.drop, "p", 0.0),
    "last.eps": lambda m: setattr(m.last, "eps", 1.0),
    "scale": lambda m: setattr(m, "scale", 1.0),
    "l": lambda m: setattr(m, "l", Doubled(6, 6)),
    "layers.0": lambda m: m.layers._modules.update({"0": Doubled(6, 6)}),
    "drop.forward": lambda m: setattr(m.drop, "forward", lambda x: x),
}
OF_THE_ORIGINAL = OF_BOTH | {
    "gains": lambda m: m.gains.append(5.0) or m.gains.reverse(),
    "act": lambda m: setattr(m, "act", F.gelu),
    "config.gain": lambda m: setattr(m.config, "gain", 1.0),
    "config.times": lambda m: setattr(m.config, "times", 2.0),
    "rate": lambda m: setattr(m, "rate", 2.0),
    "config": lambda m: setattr(m, "config", SimpleNamespace(gain=1.0, times=1.0)),
    "layers.2": lambda m: m.layers.append(nn.ReLU()),
}
HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward hook": lambda m: m.register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda m: m.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", OF_THE_ORIGINAL)
def test_what_changes_on_the_original_is_refused_by_name(both: tuple[Net, Any], name: str) -> None:
    model, converted = both
    with left_alone(model):
        OF_THE_ORIGINAL[name](model)
        with pytest.raises(fxamp.CaptureError, match=rf"'{name}' of the original Net was .* is .* now"):
            converted(example())
    model.config.gain = 3.0
    vars(model.config).pop("times", None)
    assert_is_eager(converted, model)  # set back


@pytest.mark.parametrize(("kind", "name"), [(Net, "rate"), (Config, "times")])
def test_what_changes_on_a_class_is_refused_by_name(
    both: tuple[Net, Any], kind: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, converted = both
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, 2.0)
        with pytest.raises(fxamp.CaptureError, match=rf"'{kind.__name__}.{name}' of the original Net was 1.0"):
            converted(example())
    assert_is_eager(converted, model)


@pytest.mark.parametrize("name", OF_BOTH)
def test_what_changes_on_the_converted_module_is_refused_by_name(both: tuple[Net, Any], name: str) -> None:
    model, converted = both
    with left_alone(converted):
        OF_BOTH[name](converted)
        with pytest.raises(fxamp.CaptureError, match=rf"'{name}' of the converted Net .* now"):
            converted(example())
    assert_is_eager(converted, model)


def test_a_layer_put_in_place_of_one_of_its_kind_is_another(both: tuple[Net, Any]) -> None:
    model, converted = both
    before, model.l = model.l, nn.Linear(6, 6)
    with pytest.raises(fxamp.CaptureError, match=r"'l' of .* was a Linear .*, and is another Linear now"):
        converted(example())
    model.l = before
    converted(example())


def test_a_model_that_was_changed_is_converted_again(model: Net) -> None:
    converted = o0(model)
    model.drop.p = model.scale = 0.25
    with pytest.raises(fxamp.CaptureError, match="convert it again"):
        converted(example())
    assert_is_eager(o0(model), model)


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_comes_later_is_refused_by_name_until_it_is_removed(both: tuple[Net, Any], kind: str) -> None:
    model, converted = both
    for module, whose in ((model, "original"), (converted, "converted")):
        handle = HOOKS[kind](module.l)
        with pytest.raises(fxamp.CaptureError, match=rf"'l' of the {whose} Net has a {kind} now .*lambda"):
            converted(example())
        handle.remove()
        assert_is_eager(converted, model)


def test_hooks_on_the_converted_module_itself_run(both: tuple[Net, Any]) -> None:
    seen: list[Any] = []
    with left_alone(both[1]):
        both[1].register_forward_hook(lambda *_: seen.append(1))
        both[1](example())
    assert seen == [1]


@pytest.mark.parametrize("whole", ["parametrizations", "hook"])
def test_a_layer_of_the_original_that_is_parametrized_later_is_named(model: Net, whole: str) -> None:
    converted = o0(model, front_end="fx")
    if whole == "hook":
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(model.l)
    else:
        nn.utils.parametrizations.weight_norm(model.l)
    with pytest.raises(fxamp.CaptureError, match=r"original Net .* now"):
        converted(example())


def test_what_forward_does_not_read_may_change(both: tuple[Net, Any]) -> None:
    model, converted = both
    with left_alone(model, converted):
        model(example())  # counts its calls
        model.unread = model.config.unread = converted.unread = 5.0
        model.l.weight = nn.Parameter(torch.ones(6, 6))
        model.l.bias = None  # type: ignore[assignment]
        assert_is_eager(converted, model)


def test_flags_of_single_layers_of_the_original_are_followed(both: tuple[Net, Any]) -> None:
    model, converted = both
    model.norm.eval()
    assert_is_eager(converted, model)
    model.train()
    assert_is_eager(converted, model)
    model.eval()
    with pytest.warns(UserWarning, match=r"^eval\(\) was called on the original .* still in train mode") as said:
        converted(example())
    assert said[0].filename == __file__
    assert all(m.training for m in converted.modules())  # the mode of the whole is its own
    model.train()
    model.drop.eval()
    assert_is_eager(converted, model)
    model.train()
    assert_is_eager(converted, model)


def test_statistics_are_not_computed_anew_with_the_momentum_of_the_graph(both: tuple[Net, Any]) -> None:
    said = r"'norm\.momentum' of the converted Net was 0\.1 .* is None now"
    with left_alone(both[1]), pytest.raises(fxamp.CaptureError, match=said):
        update_bn([example()], both[1])


def test_statistics_computed_anew_on_the_original_are_those_of_the_converted_module(model: Net) -> None:
    converted = o0(model)
    update_bn([example(8)], model)
    assert_same(converted.norm.running_mean, model.norm.running_mean)
    assert_is_eager(converted.eval(), model.eval())


def asks_a_weight(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x)
    return y if self.l.weight.requires_grad else y * 3


def asks_an_input(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x)
    return y * 3 if x.requires_grad else y


def asks_a_value(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x)
    return y if y.requires_grad else y * 3


def test_a_branch_on_what_a_parameter_requires_is_refused_for_the_other_side() -> None:
    model = Two(asks_a_weight)
    converted = o0(model)
    assert_is_eager(converted, model)
    model.m.requires_grad_(False)  # no one asks
    assert_is_eager(converted, model)
    model.l.requires_grad_(False)
    with pytest.raises(fxamp.CaptureError, match=r"'l\.weight' does not require gradients.*test_baked_state\.py:\d+"):
        converted(example())


def test_a_branch_on_what_an_input_requires_is_refused_for_the_other_side() -> None:
    model = Two(asks_an_input)
    converted = o0(model)
    assert_is_eager(converted, model)
    with pytest.raises(fxamp.CaptureError, match=r"input 'x' requires gradients.*test_baked_state\.py:\d+"):
        converted(example().requires_grad_())


def test_a_branch_on_what_a_value_requires_has_a_graph_for_each_grad_mode() -> None:
    model = Two(asks_a_value)
    converted = o0(model)
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            assert_is_eager(converted, model)
    model.requires_grad_(False)
    with pytest.raises(fxamp.CaptureError, match=r"does not require gradients, and required them"):
        converted(example())


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this torch does not have it")
def test_a_loss_of_torch_that_asks_what_requires_gradients_loses_none() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Any:
        return self.loss(self.l(x), y)

    options = nn.LinearCrossEntropyOptions(batch_chunk_size=2, allow_retain_graph=True)
    model = Two(forward, loss=nn.LinearCrossEntropyLoss(6, 6, options=options))
    model.loss.requires_grad_(False)
    inputs = example(), torch.randint(6, (4,))
    converted = o0(model, inputs, dynamic_shapes=None)
    assert_is_eager(converted, model, *inputs)
    model.loss.requires_grad_()
    with pytest.raises(fxamp.CaptureError, match=r"'loss\.linear\.weight' requires gradients"):
        converted(*inputs)


def test_gradients_that_no_one_asks_for_are_switched_freely(model: Net) -> None:
    converted = o0(model)
    model.l.requires_grad_(False)
    assert_is_eager(converted, model)
    model.requires_grad_(False)
    converted(example().requires_grad_())


def test_a_model_that_no_one_refers_to_any_more_is_let_go() -> None:
    model = Net()
    converted, gone = o0(model), weakref.ref(model)
    drop = model.drop
    del model
    gc.collect()
    assert gone() is None
    drop.p = 0.0
    converted(example())


def test_copies_compare_their_own_layers(both: tuple[Net, Any]) -> None:
    model, converted = both
    saved = io.BytesIO()
    torch.save(converted, saved)
    saved.seek(0)
    others: list[Any] = [copy.deepcopy(converted), AveragedModel(converted).module]
    others.append(torch.load(saved, weights_only=False))
    with left_alone(model):
        model.drop.p = 0.0
        for other in others:
            other(example())  # is bound to no original
            other.drop.p = 0.0
            with pytest.raises(fxamp.CaptureError, match=r"'drop\.p' of the converted Net was 0\.5"):
                other(example())


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_number_that_changes_after_torch_compile_is_refused_too(both: tuple[Net, Any], fullgraph: bool) -> None:
    converted = both[1]
    torch._dynamo.reset()
    compiled: Any = torch.compile(converted, backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        compiled(example())
    with left_alone(converted):
        converted.drop.p = 0.0
        with pytest.raises(Exception, match=r"(?s)CaptureError|'drop\.p' of the converted Net was 0\.5"):
            compiled(example())


def test_a_changed_module_is_not_copied_as_if_it_were_right(both: tuple[Net, Any]) -> None:
    with left_alone(both[1]):
        both[1].drop.p = 0.0
        with pytest.raises(fxamp.CaptureError, match=r"'drop\.p'"):
            copy.deepcopy(both[1])


def test_parameters_that_are_put_in_the_place_of_others_are_followed_in_every_layer() -> None:
    model = Two(lambda self, x: self.m(self.lstm(self.l(x)[None])[0][0]), lstm=nn.LSTM(6, 6))
    converted = o0(model)
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}, assign=True)
    assert_same(converted(example()), model(example()))
    model.double().float()
    assert_same(converted(example()), model(example()))


def test_layers_that_run_as_they_are_follow_their_own_attributes() -> None:
    model = Two(lambda self, x: self.m(self.gru(self.l(x)[None])[0]), gru=nn.GRU(6, 6, 2, dropout=0.5))
    converted = fxamp.convert(model, policy="O0")  # by symbolic tracing, the layer of recurrence stays whole
    converted.gru.dropout = 0.0
    assert_same(converted(example()), converted(example()))
    model.gru.dropout = 0.1  # type: ignore[union-attr]
    with pytest.raises(fxamp.CaptureError, match=r"'gru\.dropout' of the original"):
        converted(example())
