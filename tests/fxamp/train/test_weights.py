"""Weights cast once a window: the bits of weights cast at every use, with fewer casts, and nothing left behind."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.measure.counts import _Counter, step_counts
from fxamp.train.step import TrainStep
from fxamp.train.weights import WeightCasts
from fxamp.train.window import close_window
from fxamp.view import copies as copies_file
from passes.contract.errors import CaptureError, PolicyError
from tests.support.helpers import Layers, matrix, saved
from tests.support.subjects import subject, unchanged
from tests.support.zoo import BY_NAME

WIDTH, VOCABULARY = 16, 11
NEVER = "O1,dtype=bf16,share_casts=never"


class Tied(nn.Module):
    """A small language model whose embedding, read in FP32, is its head too, read low; one layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(self.last(x + self.twice(F.gelu(self.twice(x)))))


def converted(policy: str = "O1,dtype=bf16", captured: bool = False) -> Any:
    """Return a view of a new model with the same weights; one that is captured knows what it casts."""
    torch.manual_seed(0)
    return fxamp.convert(Tied(), (batch(0),) if captured else None, policy=policy, check=False)


def batch(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(seed))


def loss_of(logits: Tensor, target: tuple[Tensor, float]) -> Tensor:
    ids, factor = target
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten()) * factor


def make_step(model: nn.Module, weights: Any = "per_step", **settings: Any) -> TrainStep:
    settings.setdefault("accumulate_steps", 3)
    return TrainStep(
        model, settings.pop("loss_fn", loss_of), SGD(model.parameters(), lr=0.1), weights=weights, **settings
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(a: nn.Module, b: nn.Module) -> None:
    left, right = gradients(a), gradients(b)
    assert left.keys() == right.keys()
    assert left
    for name, gradient in left.items():
        assert torch.equal(gradient, right[name]), name


def run_window(step: TrainStep, seeds: Iterable[int]) -> None:
    for seed in seeds:
        step(batch(seed), (batch(seed), 1.0))


def casts_of(run: Callable[[], object]) -> int:
    with _Counter() as counter:
        run()
    return counter.casts


# ------------------------------------------------------------------------------------- the same bits


@pytest.mark.default_case(policy="O2,dtype=bf16")
@pytest.mark.usefixtures("eager_and_traced")
@pytest.mark.parametrize("policy", ["O1,dtype=bf16", "O2,dtype=bf16", NEVER])
def test_every_gradient_within_a_window_is_that_of_casts_at_every_use(policy: str) -> None:
    ours, theirs = converted(policy), converted(policy)
    one, other = make_step(ours), make_step(theirs, "per_use")
    for seed in range(2):
        one(batch(seed), (batch(seed), 1.0))
        other(batch(seed), (batch(seed), 1.0))
        assert_same_gradients(ours, theirs)


@pytest.mark.usefixtures("eager_and_traced")
@pytest.mark.parametrize("policy", ["O2,dtype=bf16", *matrix("O1,dtype=bf16")])
@pytest.mark.parametrize("name", ["lstm_tagger", *matrix(*(n for n in BY_NAME if n != "lstm_tagger"))])
def test_gradients_of_real_models_are_those_of_casts_at_every_use(name: str, policy: str) -> None:
    found = subject(name)
    model, args, kwargs = found.model.train(), found.args, found.kwargs
    module = fxamp.convert(model, args, kwargs, policy=policy, check=False)
    with unchanged(model):
        _compare_weights(module, model, found.zoo.loss, kwargs or args)


def _compare_weights(module: nn.Module, model: nn.Module, loss: Callable[[Any], Tensor], inputs: Any) -> None:
    found, states = [], []
    buffers = [b.clone() for b in model.buffers()]
    for weights in ("per_step", "per_use"):
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.data.copy_(before)
        step = TrainStep(
            module, lambda output: loss(output), SGD(model.parameters(), lr=0.1), accumulate_steps=4,
            weights=weights,
        )  # fmt: skip
        torch.manual_seed(1)
        for _ in range(3):
            step(inputs)
        found.append(gradients(model))
        states.append([b.clone() for b in model.buffers()])
        close_window(step)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(g, found[1][n]) for n, g in found[0].items())
    assert all(map(torch.equal, *states))


class Siamese(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self.encoder(b)
        return self.encoder(a) * self.encoder(b) - teacher


@pytest.mark.usefixtures("eager_and_traced")
def test_a_model_called_twice_in_a_micro_batch_sums_gradients_as_before() -> None:
    ours, theirs = Siamese(converted()), Siamese(converted())
    steps = [make_step(m, w, loss_fn=lambda o: o.square().mean()) for m, w in ((ours, "per_step"), (theirs, "per_use"))]
    for seed in range(2):
        for step in steps:
            step((batch(seed), batch(seed + 9)))
        assert_same_gradients(ours, theirs)


# ------------------------------------------------------------------------------------- fewer casts


@pytest.mark.default_case(policy="O1,dtype=bf16")
@pytest.mark.parametrize("policy", ["O1,dtype=bf16", "O2,dtype=bf16"])
def test_a_window_casts_each_weight_once(policy: str) -> None:
    counts = {}
    for weights in ("per_use", "per_step"):
        step = make_step(converted(policy), weights, accumulate_steps=4)
        counts[weights] = casts_of(functools.partial(run_window, step, [0] * 4))
    kept = len(step.weights.kept)
    assert kept == len(step.weights.copies) == 5
    assert counts["per_use"] - counts["per_step"] == 3 * kept


def test_what_is_saved_for_backward_is_no_more_than_under_autocast() -> None:
    model, torch_model = converted("O2,dtype=bf16"), Tied()
    step = make_step(model)

    def autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(torch_model(batch(0)), (batch(0), 1.0))

    with step.weights.window():
        saved = step_counts(lambda: loss_of(model(batch(0)), (batch(0), 1.0))).saved_bytes
    assert saved <= step_counts(autocast).saved_bytes


class Peak(TorchDispatchMode):
    """Adds up the storages that ops made and that live, and notes the most at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.bytes = max(self.bytes, sum(size for _, size in self._live.values()))
        return out


@pytest.mark.matrix  # of a BERT; what is saved for backward is counted above
def test_the_peak_of_a_window_at_o2_is_no_more_than_under_autocast() -> None:
    zoo = BY_NAME["hf_bert"]
    torch.manual_seed(0)
    model = zoo.build().train()
    args, kwargs = zoo.inputs(16)

    def by_hand() -> None:
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = zoo.loss(model(*args, **kwargs))
            loss.backward()
        model.zero_grad()

    module = fxamp.convert(model, args, kwargs, policy="O2,dtype=bf16")
    step = TrainStep(module, lambda o: zoo.loss(o), SGD(model.parameters(), lr=0.0), accumulate_steps=4)
    assert step.weights.mode == "per_step"

    def by_step() -> None:
        for _ in range(4):
            step(kwargs or args)  # a result that is kept holds the output

    peaks = []
    for run in (by_hand, by_step):
        with Peak() as peak:
            run()
        peaks.append(peak.bytes)
    assert 0 < peaks[1] < peaks[0]


def test_copies_keep_their_memory_and_are_made_anew_for_each_window_by_one_launch() -> None:
    step = make_step(converted(), accumulate_steps=2)
    addresses, launches = [], []
    for _ in range(3):
        with Launches() as counter:
            run_window(step, range(2))
        addresses.append(sorted(copy.low.data_ptr() for copy in step.weights.copies._copies.values()))
        launches.append(counter.sizes)
    assert launches == [[], [5], [5]]
    assert addresses[0] == addresses[1] == addresses[2]


class Launches(TorchDispatchMode):
    """Counts the batched copies, and how many tensors each copied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._foreach_copy_.default:
            self.sizes.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_a_copy_that_a_window_does_not_read_is_not_made_for_the_next() -> None:
    def both(self: Any, ids: Tensor, which: str) -> Any:
        return {"loss": sum(loss_of(self.parts[one](ids), (ids, 1.0)) for one in which)}

    model = Layers(both, parts=nn.ModuleDict({"a": converted(), "b": converted()}))
    step = make_step(model, loss_fn=None, accumulate_steps=1)
    with Launches() as launches:
        for which in ("ab", "a", "a", "ab", "ab"):
            step((batch(0), which))
    assert launches.sizes == [10, 5, 5, *[1] * 5, 10]  # what a window reads unexpectedly is cast one by one


def test_a_backward_through_the_copies_of_an_earlier_window_is_an_error() -> None:
    outputs: list[Tensor] = []

    def loss(output: Tensor, target: Any) -> Tensor:
        outputs.append(output)
        return loss_of(output, target)

    step = make_step(converted(), loss_fn=loss, accumulate_steps=1)
    run_window(step, [0])
    kept = outputs[0].sum()
    run_window(step, [1])
    with pytest.raises(RuntimeError):
        kept.backward()


@pytest.mark.parametrize("compile", [False, True])
def test_auto_keeps_casts_where_a_window_has_several_micro_batches(compile: bool) -> None:
    modes = {n: make_step(converted(), "auto", accumulate_steps=n, compile=compile).weights.mode for n in (1, 2)}
    assert modes == {1: "per_use", 2: "per_step"}
    assert make_step(Tied(), "auto").weights.mode == "per_use"


def test_in_a_window_of_one_a_weight_that_is_cast_once_is_cast_once_either_way() -> None:
    counts = []
    for weights in ("per_use", "per_step"):
        step = make_step(converted("O2,dtype=bf16"), weights, accumulate_steps=1)
        run_window(step, [0])
        with _Counter() as counter:
            run_window(step, [0])
        counts.append((counter.casts, counter.cast_bytes))
    assert counts[0][1] == counts[1][1]
    assert counts[0][0] - counts[1][0] == 4  # five casts by one launch


@pytest.mark.usefixtures("eager_and_traced")
def test_auto_counts_a_weight_that_is_cast_at_two_places_of_the_graph() -> None:
    views = []
    for _ in range(2):
        torch.manual_seed(0)
        views.append(fxamp.convert(Tied(), (batch(0),), policy=NEVER, check=False))
    step, other = (make_step(v, w, accumulate_steps=1) for v, w in zip(views, ("auto", "per_use"), strict=True))
    assert (step.weights.mode, step.weights.times, len(step.weights.kept)) == ("per_step", 2, 5)
    for one in (step, other):
        run_window(one, [0])
    with _Counter() as kept:
        run_window(step, [0])
    with _Counter() as cast:
        run_window(other, [0])
    assert kept.cast_bytes < cast.cast_bytes
    assert len(step.weights.copies) == 5
    assert all(map(torch.equal, views[0].parameters(), views[1].parameters()))


def test_a_weight_that_many_graphs_read_is_kept_once() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(3, WIDTH)
    one, other = (fxamp.convert(inner, (x,), policy="O1,dtype=bf16") for _ in range(2))
    assert WeightCasts(one, "auto", 1).mode == "per_use"  # each of its graphs casts a weight once
    both = nn.Sequential(one, other)  # the same weights in two views
    step = TrainStep(both, lambda o: o.mean(), SGD(inner.parameters(), lr=0.1), accumulate_steps=2)
    assert step.weights.times == 4
    step(x)
    both.eval()
    step(x)
    assert len(step.weights.copies) == 4


# ------------------------------------------------------------------------------------- nothing left behind


def test_between_calls_the_module_is_as_it_was() -> None:
    model = converted()
    masters, attributes = list(model.parameters()), set(model.__dict__)
    step = make_step(model)
    step(batch(0), (batch(0), 1.0))
    assert set(model.__dict__) == attributes
    assert all(a is b for a, b in zip(masters, model.parameters(), strict=True))
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    expected = converted()
    assert torch.equal(model(batch(0)), expected(batch(0)))
    assert casts_of(lambda: model(batch(0))) == casts_of(lambda: expected(batch(0)))
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32}
    again = copy.deepcopy(model)
    assert torch.equal(again(batch(1)), model(batch(1)))


@pytest.mark.usefixtures("eager_and_traced")
def test_an_error_in_the_third_micro_batch_leaves_masters_and_no_window() -> None:
    model, expected = converted(), converted()
    step = make_step(model, accumulate_steps=4)
    for _ in range(2):
        step(batch(0), (batch(0), 1.0))
    with pytest.raises((ValueError, RuntimeError), match="to match target"):
        step(batch(0), (batch(0)[:, :2], 1.0))
    assert not step.weights.is_open
    assert all(p.grad is None for p in model.parameters())
    other = make_step(expected, "per_use", accumulate_steps=4)
    for seed in range(4):
        assert step(batch(seed), (batch(seed), 1.0)).reason == other(batch(seed), (batch(seed), 1.0)).reason
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


# ------------------------------------------------------------------------------------- weights that change


def _edit_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("last.weight").mul_(1.5)


def _replace(model: nn.Module) -> None:
    last = model.get_submodule("last")
    last.weight = nn.Parameter(last.weight.detach() * 1.5)  # type: ignore[operator]


def _load(model: nn.Module) -> None:
    model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()})


def _assign(model: nn.Module) -> None:
    model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()}, assign=True)


def _move(model: nn.Module) -> None:
    weight = model.get_parameter("last.weight")
    weight.data = weight.data * 1.5


@pytest.mark.usefixtures("eager_and_traced")
@pytest.mark.parametrize("change", [_edit_in_place, _replace, _assign, *matrix(_load, _move)])
def test_a_change_of_a_weight_within_a_window_is_seen(change: Callable[[nn.Module], None]) -> None:
    losses: list[list[Tensor]] = [[], []]
    models = [converted(), converted()]
    for model, weights, found in zip(models, ("per_step", "per_use"), losses, strict=True):
        step = make_step(model, weights)
        found.append(step(batch(0), (batch(0), 1.0)).loss)
        change(model)
        found.append(step(batch(0), (batch(0), 1.0)).loss)
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]
    assert_same_gradients(*models)


def test_an_edit_through_data_is_seen_between_windows() -> None:
    model, fresh = converted(), converted()
    step = make_step(model, accumulate_steps=1)
    step(batch(0), (batch(0), 0.0))
    for m in (model, fresh):
        m.get_parameter("last.weight").data.mul_(1.5)
    assert torch.equal(step(batch(0), (batch(0), 0.0)).loss, loss_of(fresh(batch(0)), (batch(0), 0.0)))
    assert torch.equal(step(batch(0), (batch(0), 1.0)).loss, loss_of(fresh(batch(0)), (batch(0), 1.0)))


def test_inside_an_outer_autocast_region_no_weight_is_stale() -> None:
    losses = []
    for outer in (True, False):
        model = converted()
        step = make_step(model, accumulate_steps=2)
        with torch.autocast("cpu", torch.bfloat16, enabled=outer):
            losses.append([float(step(batch(0), (batch(0), 1.0)).loss) for _ in range(6)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3  # one for each window


def test_a_first_call_without_gradients_costs_no_weight_its_gradient() -> None:
    model = converted()
    step = make_step(model)
    with step.weights.window():
        with torch.no_grad():
            model(batch(0))
        loss_of(model(batch(0)), (batch(0), 1.0)).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.usefixtures("eager_and_traced")
def test_a_weight_frozen_within_a_window_gets_no_further_gradient() -> None:
    models = [converted(), converted()]
    for model, weights in zip(models, ("per_step", "per_use"), strict=True):
        step = make_step(model, weights)
        step(batch(0), (batch(0), 1.0))
        model.get_parameter("last.weight").requires_grad_(False)
        step(batch(1), (batch(1), 1.0))
    assert_same_gradients(*models)


# ------------------------------------------------------------------------------------- together with other things


def test_hooks_on_the_masters_fire_as_before() -> None:
    logs: list[list[tuple[str, Tensor]]] = [[], []]
    models = [converted(), converted()]
    for model, weights, log in zip(models, ("per_step", "per_use"), logs, strict=True):
        for name, p in model.named_parameters():
            p.register_hook(lambda g, log=log, name=name: log.append((name, g.clone())))
            p.register_post_accumulate_grad_hook(lambda p, log=log, name=name: log.append((f"{name}!", p.grad.clone())))
        step = make_step(model, weights)
        for seed in range(2):
            step(batch(seed), (batch(seed), 1.0))
    assert [name for name, _ in logs[0]] == [name for name, _ in logs[1]]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(*logs, strict=True))
    assert len(logs[0]) == 4 * len(list(models[0].parameters()))


@pytest.mark.usefixtures("eager_and_traced")
def test_the_loss_function_sees_the_masters_and_its_gradients_add() -> None:
    models = [converted(), converted()]
    for model, weights in zip(models, ("per_step", "per_use"), strict=True):

        def loss(logits: Tensor, target: Any, model: nn.Module = model) -> Tensor:
            return loss_of(logits, target) + sum(p.square().sum() for p in model.parameters()) * 0.01

        step = make_step(model, weights, loss_fn=loss)
        for seed in range(2):
            step(batch(seed), (batch(seed), 1.0))
    assert_same_gradients(*models)


def test_a_loss_of_gradients_with_respect_to_weights_works() -> None:
    models = [converted(), converted()]
    for model, weights in zip(models, ("per_step", "per_use"), strict=True):

        def loss(logits: Tensor, target: Any, model: nn.Module = model) -> Tensor:
            first = loss_of(logits, target)
            found = torch.autograd.grad(first, list(model.parameters()), create_graph=True)
            return first + sum(g.square().sum() for g in found)

        step = make_step(model, weights, loss_fn=loss)
        for seed in range(2):
            step(batch(seed), (batch(seed), 1.0))
    assert_same_gradients(*models)


@pytest.mark.usefixtures("eager_and_traced")
def test_a_loss_that_transforms_the_model_is_not_disturbed_by_what_is_kept() -> None:
    models = [converted(), converted()]
    for model, weights in zip(models, ("per_step", "per_use"), strict=True):

        def loss(logits: Tensor, target: Any, model: nn.Module = model) -> Tensor:
            def shifted(temperature: Tensor) -> Tensor:
                return loss_of(model(target[0]) * temperature, target)

            with torch.no_grad():
                slope = torch.func.grad(shifted)(torch.ones(()))
            return loss_of(logits, target) + shifted(1 + slope)

        step = make_step(model, weights, loss_fn=loss)
        for seed in range(2):
            step(batch(seed), (batch(seed), 1.0))
    assert_same_gradients(*models)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant
        self.scale = nn.Parameter(torch.ones(VOCABULARY))

    def forward(self, ids: Tensor) -> Tensor:
        def run(scale: Tensor) -> Tensor:
            return self.inner(ids) * scale

        if self.reentrant is None:
            return run(self.scale)
        return checkpoint(run, self.scale, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_round_a_converted_module_recomputes_the_same(reentrant: bool) -> None:
    models = [Checkpointed(converted(), r) for r in (reentrant, reentrant, None)]
    counts = []
    for model, weights in zip(models, ("per_step", "per_use", "per_use"), strict=True):
        step = make_step(model, weights)
        counts.append(casts_of(functools.partial(run_window, step, range(2))))
    assert_same_gradients(models[0], models[1])
    assert_same_gradients(models[0], models[2])
    assert counts[0] == counts[1] - 3 * 5  # forward and recomputation of two micro-batches, and one cast of each


@pytest.mark.usefixtures("eager_and_traced")
def test_frozen_weights_are_kept_too() -> None:
    models = [converted(), converted()]
    for model, weights in zip(models, ("per_step", "per_use"), strict=True):
        model.get_submodule("twice").requires_grad_(False)
        step = make_step(model, weights)
        for seed in range(2):
            step(batch(seed), (batch(seed), 1.0))
    assert_same_gradients(*models)
    assert "twice.weight" not in gradients(models[0])


def test_gradients_are_compatible_with_a_mid_window_state_dict() -> None:
    model = converted()
    step = make_step(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    step(batch(0), (batch(0), 1.0))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], before[k]) for k in before)


@pytest.mark.usefixtures("eager_and_traced")
@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
def test_a_copy_of_a_step_trains_its_own_model_the_same_and_is_made_between_windows(
    copied: Callable[[TrainStep], TrainStep],
) -> None:
    step = make_step(converted(), scaler=fxamp.LossScaler(init_scale=8.0))
    run_window(step, range(3))
    twin = copied(step)
    assert not {id(p) for p in step.model.parameters()} & {id(p) for p in twin.model.parameters()}
    for one in (step, twin):
        run_window(one, range(3, 5))
        assert (one.weights.mode, len(one.weights.copies)) == ("per_step", 5)
    assert_same_gradients(step.model, twin.model)
    with pytest.raises(PolicyError, match=r"within a window: call flush\(\)"):
        copied(step)
    run_window(step, [5])
    run_window(twin, [5])
    assert all(map(torch.equal, step.model.parameters(), twin.model.parameters()))


def test_weights_are_frozen_between_micro_batches_and_not_in_them() -> None:
    model = converted()
    step = make_step(model)
    with fxamp.frozen(model), pytest.raises(CaptureError, match=r"Tied is frozen.*leave fxamp\.frozen before"):
        step(batch(0), (batch(0), 1.0))
    step(batch(0), (batch(0), 1.0))
    with torch.no_grad(), fxamp.frozen(model):
        expected = model(batch(0))
        model.get_parameter("last.weight").data.mul_(2)
        assert torch.equal(model(batch(0)), expected)
    assert torch.equal(model(batch(0)), _again(model)(batch(0)))


def test_a_window_in_the_window_of_another_step_is_refused_by_the_first() -> None:
    model = converted()
    first, second = make_step(model), make_step(model)
    first(batch(0), (batch(0), 1.0))
    run_window(second, [1, 2, 3])
    with pytest.raises(PolicyError, match="were cleared before the next one"):
        first(batch(0), (batch(0), 1.0))


def test_calls_outside_of_the_step_see_every_edit(reads_stale: Callable[[Any, Any], None]) -> None:
    model = converted()
    step = make_step(model)
    run_window(step, range(3))
    reads_stale(step, model)
    for p in model.parameters():  # as libraries of averaged weights swap them for validation
        p.data.mul_(0.5)
    with torch.no_grad():
        assert torch.equal(model(batch(0)), _again(model)(batch(0)))
    assert torch.equal(model(batch(0)), _again(model)(batch(0)))


def _left_over(step: TrainStep, model: nn.Module) -> None:
    step(batch(0), (batch(0), 1.0))


def _empty_window(step: TrainStep, model: nn.Module) -> None:
    with step.window(), torch.no_grad():
        model(batch(0))
    step.flush()


def _out_of_memory(step: TrainStep, model: nn.Module) -> None:
    def raising(*args: Any) -> None:
        raise torch.OutOfMemoryError("while weights are cast")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies_file, "copy_together", raising)
        with pytest.raises(torch.OutOfMemoryError):
            step(batch(0), (batch(0), 1.0))
    with torch.no_grad(), fxamp.frozen(model):
        model(batch(0))


@pytest.fixture(params=[_left_over, _empty_window, _out_of_memory])
def reads_stale(request: pytest.FixtureRequest) -> Any:
    return request.param


def _again(model: nn.Module) -> nn.Module:
    fresh = converted()
    fresh.load_state_dict(model.state_dict())
    return fresh


# ------------------------------------------------------------------------------------- refused


def test_per_step_is_refused_where_nothing_was_converted() -> None:
    with pytest.raises(PolicyError, match=r"no part of this model is converted: give what fxamp\.convert"):
        make_step(Tied())


def _compiled_by_torch() -> nn.Module:
    made: Any = torch.compile(Tied(), backend="eager")
    return made


def _compiled_in_place() -> nn.Module:
    model = Tied()
    model.compile(backend="fxamp", options={"backend": "eager"})
    return model


@pytest.mark.parametrize("make", [_compiled_by_torch, _compiled_in_place])
def test_per_step_is_refused_for_a_compiled_model_with_the_reason(make: Callable[[], nn.Module]) -> None:
    model = make()
    with pytest.raises(PolicyError, match=r"'the model' is compiled .*'per_use'"):
        make_step(model)
    inside = nn.Sequential(model)
    with pytest.raises(PolicyError, match=r"'0' is compiled"):
        make_step(inside)
    weights = make_step(inside, "auto").weights
    assert (weights.mode, next(iter(weights.per_use))) == ("per_use", "0")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_view_that_is_compiled_keeps_casts_too(backend: str) -> None:
    torch.compiler.reset()
    found = []
    for weights in ("per_step", "per_use"):
        torch.manual_seed(0)
        model: Any = torch.compile(fxamp.compile(Tied(), policy="O1,dtype=bf16", backend=backend), backend="eager")
        step = make_step(model, weights)
        run_window(step, range(6))
        assert step.weights.mode == weights
        assert len(step.weights.copies) == (5 if weights == "per_step" else 0)
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_per_step_is_refused_where_parameters_are_gone() -> None:
    model = nn.Linear(4, 4, bias=False)
    parametrize.register_parametrization(model, "weight", nn.Identity())
    view = fxamp.convert(model, (torch.randn(2, 4),), policy="O0")
    with pytest.raises(PolicyError, match="this model has no cast that can be kept"):
        WeightCasts(view, "per_step", 4)
