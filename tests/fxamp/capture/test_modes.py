"""One graph for both training modes: flags are followed module by module, and anything else is refused."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from tests.support.helpers import FRONT_ENDS, Two, assert_is_eager, assert_same, convert_fixed, example, o0

both = pytest.mark.parametrize("front_end", FRONT_ENDS)


class Regularised(nn.Module):
    """Batch norm, dropout as a module and as two functions, one of which never stops."""

    def __init__(self, **norm: Any) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6, **norm)
        self.drop = nn.Dropout(0.5)
        self.inner = Two(functional)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.drop(self.norm(self.l(x))))


def functional(self: Any, x: Tensor) -> Tensor:
    return F.dropout(F.dropout(self.l(x), 0.3, self.training), 0.2, True)


def guarded_dropout(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    if self.training:
        y = F.dropout(y, 0.4)
    return self.m(y)


def attention(self: Any, x: Tensor) -> Tensor:
    q, k = self.l(x)[None, None], self.m(x)[None, None]
    return F.scaled_dot_product_attention(q, k, x[None, None], dropout_p=0.4 if self.training else 0.0)


def scaled(self: Any, x: Tensor) -> Tensor:
    return self.l(x) * (2.0 if self.training else 1.0)


def structural(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    return y if self.training else self.m(y)


def constant(self: Any, x: Tensor) -> Tensor:
    return self.l(x) + (torch.tensor(1.0) if self.training else torch.tensor(2.0))


def another_return(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    return {"y": y} if self.training else (y,)


MODES: dict[str, Callable[[Any], Any]] = {
    "train": lambda m: m.train(),
    "eval": lambda m: m.eval(),
    "norm frozen": lambda m: (m.train(), m.norm.eval()),
    "drop alone": lambda m: (m.eval(), m.drop.train()),
    "inner alone": lambda m: (m.eval(), m.inner.train()),
    "inner frozen": lambda m: (m.train(), m.inner.eval()),
}


@both
def test_the_whole_and_each_submodule_switch_as_in_the_model(front_end: str) -> None:
    model = Regularised()
    converted = o0(model, front_end=front_end)
    for switch in MODES.values():
        switch(model)
        switch(converted)
        assert_is_eager(converted, model)


@both
@pytest.mark.parametrize("norm", [{"track_running_stats": False}, {"affine": False}, {"momentum": 0.3}])
def test_batch_norms_of_every_kind(front_end: str, norm: dict[str, Any]) -> None:
    model = Regularised(**norm)
    converted = o0(model, front_end=front_end)
    for name in ("train", "eval", "norm frozen"):
        MODES[name](model)
        MODES[name](converted)
        assert_is_eager(converted, model)


@both
def test_a_cumulative_batch_norm_is_refused_at_its_line(front_end: str) -> None:
    with pytest.raises(fxamp.CaptureError, match=r"cannot capture Regularised.*test_modes\.py"):
        o0(Regularised(momentum=None), front_end=front_end)


@both
def test_batches_are_counted_in_training_only(front_end: str) -> None:
    model = Regularised()
    converted = o0(model, front_end=front_end)
    converted(example())
    converted(example())
    converted.norm.eval()
    converted(example())
    assert int(model.norm.num_batches_tracked or 0) == 2


@both
def test_a_batch_of_one_has_no_variance_to_normalise_by(front_end: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    converted = o0(model, front_end=front_end, dynamic_shapes="auto")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        converted(example()[:1])
    assert all(before[name].equal(buffer) for name, buffer in model.named_buffers() if "tracked" not in name)
    assert converted.eval()(example()[:1]).equal(model.eval()(example()[:1]))


@both
@pytest.mark.parametrize("policy", ["O0", "O1", "O2"])
def test_nothing_is_written_in_eval_mode(front_end: str, policy: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    converted = convert_fixed(model, (example(),), policy=policy, capture=front_end).eval()
    versions = {name: buffer._version for name, buffer in model.named_buffers()}
    converted(example())
    gradient = torch.func.grad(lambda x: converted(x).sum())(example())
    assert {name: buffer._version for name, buffer in model.named_buffers()} == versions
    expected = torch.func.grad(lambda x: model.eval()(x).sum())(example())
    assert (gradient - expected).norm() <= (0 if policy == "O0" else 0.02) * expected.norm()


@both
@pytest.mark.parametrize("forward", [functional, guarded_dropout, attention, scaled, constant])
def test_a_literal_that_depends_on_the_mode_follows_it(front_end: str, forward: Callable[..., Any]) -> None:
    if forward is constant and front_end == "export":
        pytest.skip("export makes a tensor of the number: see below")
    model = Two(forward)
    converted = o0(model, front_end=front_end)
    assert converted.plan.notes == ()
    for training in (True, False, True):
        model.train(training)
        converted.train(training)
        assert_is_eager(converted, model)


@both
def test_flags_are_copied_and_independent(front_end: str) -> None:
    model = Regularised()
    model.norm.eval()
    cells = nn.GRU(2, 2)
    model.add_module("cells", cells)
    converted = o0(model, front_end=front_end)
    assert [m.training for m in model.modules()] == [
        converted.get_submodule(path).training for path, _ in model.named_modules()
    ]
    assert_is_eager(converted, model)
    converted.eval()
    assert model.training
    assert model.drop.training
    assert cells.training
    model.eval()
    converted.train()
    assert not model.drop.training


@both
@pytest.mark.parametrize("forward", [structural, constant, another_return])
@pytest.mark.parametrize("training", [True, False])
def test_where_the_modes_compute_differently_each_has_a_graph(
    front_end: str, forward: Callable[..., Any], training: bool
) -> None:
    if forward is constant and front_end == "fx":
        pytest.skip("symbolic tracing keeps the number: see above")
    model = Two(forward).train(training)
    converted = o0(model, front_end=front_end)
    assert [str(v.state) for v in converted.variants] == ["training", "evaluation"][:: 1 if training else -1]
    for again in (converted, copy.deepcopy(converted), copy.copy(converted), pickle.loads(pickle.dumps(converted))):
        for mode in (training, not training, training):
            model.train(mode)
            again.train(mode)
            assert_same(again(example()), again(example()))
            if again is converted:
                assert_is_eager(again, model)


@both
def test_flags_of_single_modules_hold_too_where_each_mode_has_a_graph(front_end: str) -> None:
    class Frozen(Regularised):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if self.training else self.l(x))

    model = Frozen()
    model.norm.eval()
    converted = o0(model, front_end=front_end)
    assert_is_eager(converted, model)  # as it was when it was converted
    for training in (True, False):
        model.train(training)
        converted.train(training)
        assert_is_eager(converted, model)
    converted.norm.train()
    with pytest.raises(fxamp.CaptureError, match=r"for: mixed training flags; training; evaluation\. This .* 'norm'"):
        converted(example())


def test_a_plan_names_the_states_and_replays_all_of_them() -> None:
    model = Two(structural)
    converted = convert_fixed(model, (example(),), policy="O1,dtype=bf16")
    plan = converted.plan
    assert plan.states == ("0: training", "1: evaluation")
    assert [d.key for d in plan.decisions] == ["l/linear#0", "m/linear#0"]  # what both decide is listed once
    assert len(fxamp.graphs(converted)) == 2
    again = convert_fixed(model, (example(),), plan=fxamp.Plan.from_json(plan.to_json()))
    assert again.plan == plan
    one = fxamp.plan(Two(), (example(),))
    with pytest.raises(fxamp.PlanError, match=r"is for 1 state\(s\) of a model .*and this model has 2: training"):
        fxamp.convert(model, (example(),), plan=one)


def test_the_graph_and_its_code_are_those_of_the_present_state() -> None:
    converted = o0(Two(structural))
    assert converted.code.count("linear.default") == 1
    converted.eval()
    assert converted.code.count("linear.default") == 2
    assert len(converted.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)) == 2
    exported = torch.export.export(converted, (example(),), strict=False).module()
    assert torch.equal(exported(example()), converted(example()))


def test_a_state_that_cannot_be_captured_is_named_when_it_is_called(caplog: pytest.LogCaptureFixture) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.l(x)
        return y * float(y.sum()) if self.training else y  # a number that only data decides

    model = Two(forward).eval()
    with caplog.at_level(logging.WARNING, "fxamp"):
        converted = o0(model)
    assert "forward is not captured for training" in caplog.text
    assert_is_eager(converted, model)
    with pytest.raises(fxamp.CaptureError, match=r"could not be captured in the state .* now, training.*jit"):
        converted.train()(example())


def test_a_state_that_cannot_be_captured_is_named_where_the_graph_holds_constants() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.training and torch.rand(1) > 0.5:
            return self.l(x)
        return self.l(x) + torch.tensor([1.0, 2.0, 3.0])[:1]

    converted = o0(Two(forward).eval())
    assert any(path == "_fxamp" for path, _ in converted.named_modules())
    with pytest.raises(fxamp.CaptureError, match=r"now, training.*torch\.rand\(1\) > 0\.5.*fxamp\.compile\(model\)"):
        converted.train()(example())


def test_parameters_that_are_moved_between_states_stay_those_of_every_graph() -> None:
    model = Two(structural)
    converted = o0(model)
    converted._apply(lambda t: t.detach().clone())  # as to another device
    with torch.no_grad():
        model.l.weight.mul_(2)
    for training in (True, False):
        model.train(training)
        converted.train(training)
        assert_is_eager(converted, model)


def test_frozen_weights_are_those_of_every_graph() -> None:
    model, x = Two(structural), example()
    converted = convert_fixed(model, (x,), policy="O1,dtype=bf16")
    expected = {training: converted.train(training)(x) for training in (True, False)}
    with torch.no_grad(), fxamp.frozen(converted):
        for training in (True, False):
            assert torch.equal(converted.train(training)(x), expected[training])
            casts = converted.graph.find_nodes(op="call_function", target=torch.ops.aten.to.dtype)
            assert len(casts) == 2  # of the input and the output


def test_a_region_that_differs_inside_follows_the_mode() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = F.dropout(self.l(x), 0.5, self.training)
        return self.m(y)

    model = Two(forward)
    converted = o0(model)
    for training in (True, False):
        model.train(training)
        converted.train(training)
        assert_is_eager(converted, model)


def test_capture_in_eval_mode_gives_the_same_as_in_train_mode() -> None:
    model = Regularised()
    train = o0(model)
    evaluation = o0(model.eval())
    model.train()
    torch.manual_seed(0)
    expected = train(example())
    torch.manual_seed(0)
    assert_same(evaluation.train()(example()), expected)


# The grad mode.


def by_grad_mode(self: Any, x: Tensor) -> Tensor:
    return self.l(x) if torch.is_grad_enabled() else self.m(x)  # the line


def by_grad_mode_in_training(self: Any, x: Tensor) -> Tensor:
    return self.l(x) if self.training and torch.is_grad_enabled() else self.m(self.l(x))


def by_its_own_grad_mode(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return self.l(x) if torch.is_grad_enabled() else self.m(x)


@both
def test_where_the_grad_modes_compute_differently_each_has_a_graph(front_end: str) -> None:
    model = Two(by_grad_mode)
    converted = o0(model, front_end=front_end)
    assert [str(v.state) for v in converted.variants] == ["with gradients", "without gradients"]
    for again in (converted, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        for training in (True, False):
            model.train(training)
            again.train(training)
            assert_same(again(example()), model(example()))
            with torch.no_grad():
                assert_same(again(example()), model(example()))


@both
def test_a_read_of_the_grad_mode_that_changes_nothing_leaves_one_graph(front_end: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        checkpointed = torch.is_grad_enabled() and self.l.in_features > 7
        return self.l(x) if checkpointed else self.m(self.l(x))

    converted = o0(Two(forward), front_end=front_end)
    assert len(converted.variants) == 1


def test_all_four_states_may_differ() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.l(x) if self.training else self.m(x)
        return y * 2 if torch.is_grad_enabled() else y.relu()

    model = Two(forward)
    converted = o0(model)
    assert len(converted.variants) == 4
    for training in (True, False):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                assert_same(converted.train(training)(example()), model.train(training)(example()))


def test_what_asks_for_the_grad_mode_in_training_alone_is_free_in_eval_mode() -> None:
    model = Two(by_grad_mode_in_training)
    model.eval()
    converted = o0(model)
    with torch.no_grad():
        assert_same(converted(example()), model(example()))
    assert_same(converted(example()), model(example()))


def test_a_grad_mode_of_the_models_own_and_reads_of_torchs_bind_nothing() -> None:
    for model in (Two(by_its_own_grad_mode), nn.TransformerEncoderLayer(6, 2, 6, 0.0, batch_first=True)):
        x = example()[None]
        converted = o0(model, (x,), check=False)
        assert len(converted.variants) == 1
        with torch.no_grad():
            converted(x)


class FlagOfItsClass(nn.Module):
    """Reads a flag that its class has, which no instance does."""

    training = property(lambda self: self.__dict__["training"], lambda self, on: self.__dict__.update(training=on))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


def by_layer(self: Any, x: Tensor) -> Tensor:
    return self.l(x) * (2.0 if self.m.training else 1.0)


def in_a_branch(self: Any, x: Tensor) -> Tensor:
    def doubled(y: Tensor) -> Tensor:
        return y * (2.0 if self.training else 1.0)

    made: Tensor = torch.cond(x.sum() > -1e9, doubled, torch.neg, (self.l(x),))
    return made


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
def test_a_flag_that_is_read_where_dynamo_traces_is_followed() -> None:
    model = Two(in_a_branch)
    converted = convert_fixed(model, (example(),), policy="O0", capture="export")
    for training in (True, False, True):
        assert_is_eager(converted.train(training), model.train(training))


@pytest.mark.parametrize(
    ("model", "exports"),
    [(nn.LayerNorm(6), 4), (nn.Dropout(), 4), (Two(by_layer), 4), (FlagOfItsClass(), 4)],
    ids=["asks none", "a layer asks", "asks another", "by its class"],
)
def test_both_training_modes_are_captured_whatever_was_seen_to_be_asked(
    model: nn.Module, exports: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    export = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    converted = convert_fixed(model, (example(),), policy="O1,dtype=bf16")  # as it is, and under autocast
    assert len(asked) == exports
    for training in (True, False):
        assert_as_under_autocast(converted.train(training), model.train(training))


def assert_as_under_autocast(converted: nn.Module, model: nn.Module) -> None:
    torch.manual_seed(0)
    made = converted(example())
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(made, model(example()).float())
