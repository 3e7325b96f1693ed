"""A compiled step casts no weight and no gradient: its low copies are leaves, which one graph steps and writes."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

import fxamp
from fxamp.train.step import TrainStep
from tests.fxamp.train import test_compiled_update

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of a module that Dynamo imports
GRAPHS: list[GraphModule] = []


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch.compiler.reset()
    GRAPHS.clear()


def traces(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Stand for a backend that traces to kernels, and keep what it is given."""
    GRAPHS.append(gm)
    return test_compiled_update.traces(gm, inputs)


class Tied(nn.Module):
    """A model of words, whose embedding is read in FP32 and, as its last layer, in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 16)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.inner(self.words(ids)), self.words.weight)


def loss_of(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    labels, factor = target
    return F.cross_entropy(output.flatten(0, 1), labels.flatten()) * factor


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW, foreach": lambda m: AdamW(m.parameters(), lr=0.01, foreach=True),
    "AdamW, fused": lambda m: AdamW(m.parameters(), lr=0.01, fused=True),
    "Adam": lambda m: Adam(m.parameters(), lr=0.01),
    "SGD": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9),
    "RMSprop": lambda m: RMSprop(m.parameters(), lr=0.01),
}


def step_of(optimizer: str, policy: str = "O1,dtype=bf16", **settings: Any) -> TrainStep:
    torch.manual_seed(0)
    model = Tied()
    settings.setdefault("compile", {"backend": traces})
    return TrainStep(fxamp.convert(model, policy=policy), loss_of, OPTIMIZERS[optimizer](model), **settings)


def run(step: TrainStep, windows: int = 6, first: int = 0, factors: dict[int, float] | None = None) -> list[Any]:
    """Train; return what a run shows: losses, weights, and what was skipped."""
    shown: list[Any] = []
    for index in range(first * step.accumulate_steps, (first + windows) * step.accumulate_steps):
        ids = torch.randint(24, (3, 5), generator=torch.Generator().manual_seed(index))
        result = step(ids, (ids, torch.tensor((factors or {}).get(index, 1.0))))
        shown.append((result.loss.item(), result.skipped))
    return [shown, [p.detach().clone() for p in step.model.parameters()]]


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return repr(ours[0]) == repr(theirs[0]) and all(map(torch.equal, ours[1], theirs[1]))


def leaves_of(step: TrainStep) -> Any:
    assert step.compiled is not None
    return step.compiled.leaves


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_losses_and_weights_are_those_of_a_step_whose_graphs_cast(optimizer: str, accumulate: int) -> None:
    ours = step_of(optimizer, accumulate_steps=accumulate)
    found = run(ours)
    assert same(found, run(step_of(optimizer, accumulate_steps=accumulate, weights="per_use")))
    assert leaves_of(ours).reason == ""
    assert len(leaves_of(ours)) == 5  # three weights and two biases


def test_fp16_steps_that_overflow_are_skipped_alike_and_leave_copies_as_they_were() -> None:
    found = []
    for weights in ("auto", "per_use"):
        scaler = fxamp.LossScaler(init_scale=1024.0, growth_interval=2)
        step = step_of("AdamW, foreach", "O1,dtype=fp16", scaler=scaler, weights=weights)
        found.append(run(step, 8, factors={2: float("inf"), 5: float("nan")}))
    assert same(*found)
    assert [skipped for _, skipped in found[0][0]].count(True) == 2


def looked_at(step: TrainStep, windows: int) -> Counter[torch.dtype]:
    """Train; return how many gradients of each dtype were looked at, which a CPU does by their bounds."""
    seen = Counter[torch.dtype]()
    aminmax = Tensor.aminmax

    def counted(gradient: Tensor) -> Any:
        seen[gradient.dtype] += 1
        return aminmax(gradient)

    with mock.patch.object(Tensor, "aminmax", counted):
        run(step, windows)
    return seen


def test_a_fused_optimizers_gradients_are_looked_at_in_16_bits_and_its_steps_are_skipped_as_without_leaves() -> None:
    low, full = looked_at(step_of("AdamW, fused"), 3), looked_at(step_of("AdamW, fused", weights="per_use"), 3)
    # Of a window: weights and biases of two layers in 16 bits; the norm's, and those of the embedding, which is tied.
    assert (low[torch.bfloat16], low[torch.float32]) == (3 * 4, 3 * 3)
    assert (full[torch.bfloat16], full[torch.float32]) == (0, 3 * 7)
    factors = {2: math.nan, 4: math.inf}
    ours, theirs = (run(step_of("AdamW, fused", **how), factors=factors) for how in ({}, {"weights": "per_use"}))
    assert same(ours, theirs)
    assert [skipped for _, skipped in ours[0]].count(True) == 2


def test_clipped_steps_differ_by_the_rounding_of_their_norm() -> None:
    ours, theirs = (run(step_of("AdamW, foreach", max_grad_norm=0.1, weights=w)) for w in ("auto", "per_use"))
    for a, b in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def _casts_of_weights(gm: GraphModule) -> list[Any]:
    inputs = set(gm.graph.find_nodes(op="placeholder"))
    return [n for n in gm.graph.nodes if n.op != "placeholder" and torch.bfloat16 in n.args and n.args[0] in inputs]


def test_graphs_of_a_step_cast_no_weight_and_no_gradient() -> None:
    step = step_of("AdamW, fused", update="compiled")
    run(step, 3)
    loss, update = GRAPHS
    run(step_of("AdamW, fused", weights="per_use"), 1)
    assert len(_casts_of_weights(GRAPHS[-1])) == 5
    assert step.compiled is not None
    assert step.compiled.update.eager == ""
    assert not _casts_of_weights(loss)
    ops = Counter(str(n.target) for n in update.graph.nodes if n.op == "call_function")
    low = 5
    assert ops["aten._to_copy.default"] == low  # a gradient each, where the kernel reads it
    assert ops["aten.copy_.default"] == low  # a copy each, which the kernel writes
    assert max(Counter(n for n in ops.elements() if n.startswith("aten._foreach_addcdiv")).values()) == 1  # all at once
    for master, leaf in ((leaf.master, leaf) for leaf in leaves_of(step)._leaves.values()):
        assert torch.equal(leaf.low, master.bfloat16())


def test_a_step_after_the_second_compiles_nothing_under_a_schedule_of_the_rate() -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = AdamW(model.parameters(), lr=0.01, foreach=True)
    scheduler = LambdaLR(optimizer, lambda i: 0.9**i)
    step = TrainStep(
        fxamp.convert(model, policy="O1,dtype=bf16"), loss_of, optimizer, scheduler=scheduler,
        compile={"backend": traces},
    )  # fmt: skip
    run(step, 8)
    assert len(GRAPHS) == 2


def _edits(step: TrainStep, edit: Callable[[nn.Parameter], None]) -> list[Any]:
    run(step, 3)
    with torch.no_grad():
        for p in step.model.parameters():
            edit(p)
    return run(step, 2, first=3)


@pytest.mark.parametrize(
    "edit",
    [
        lambda p: p.mul_(0.5),
        lambda p: p.copy_(torch.ones_like(p)),
        lambda p: setattr(p, "data", p.data.clone().fill_(0.1)),
    ],
)
def test_a_weight_that_is_written_between_two_windows_is_cast_again(edit: Any) -> None:
    assert same(*(_edits(step_of("SGD", weights=weights), edit) for weights in ("auto", "per_use")))


def test_an_optimizer_of_somebody_else_ends_the_copies() -> None:
    found = []
    for weights in ("auto", "per_use"):
        step = step_of("AdamW, foreach", weights=weights)
        run(step, 3)
        other = AdamW(step.model.parameters(), lr=0.1, fused=True)  # writes without a new version
        for p in step.model.parameters():
            p.grad = torch.ones_like(p)
        other.step()
        other.zero_grad()
        found.append(run(step, 2, first=3))
    assert same(*found)


def test_a_hook_on_a_gradient_sees_it_and_the_loss_is_not_compiled_again() -> None:
    found, seen = [], list[Tensor]()
    for weights in ("auto", "per_use"):
        step = step_of("SGD", weights=weights)
        run(step, 3)
        weight = step.model.get_parameter("words.weight")

        def doubled(gradient: Tensor) -> Tensor:
            seen.append(gradient)
            return 2 * gradient

        handle = weight.register_hook(doubled)
        between = run(step, 2, first=3)
        assert "has a hook" in leaves_of(step).reason or weights == "per_use"
        handle.remove()
        found.append([between[0], between[1] + run(step, 2, first=5)[1]])
        if weights == "auto":
            assert leaves_of(step).reason == ""
            assert step.compiled is not None
            assert (step.compiled.loss.frames, step.compiled.update.region.frames) == (1, 2)
    assert same(*found)
    assert len(seen) == 4


def test_on_gradients_and_a_weighted_micro_batch_find_gradients_at_the_weights() -> None:
    seen: list[list[torch.dtype]] = []

    def look(params: list[Tensor]) -> None:
        seen.append([p.grad.dtype for p in params if p.grad is not None])

    run(step_of("SGD", on_gradients=look), 2)
    assert seen == [[torch.float32] * 7] * 2
    found = []
    for weights in ("auto", "per_use"):
        step = step_of("SGD", weights=weights)
        for index in range(4):
            ids = torch.randint(24, (3, 5), generator=torch.Generator().manual_seed(index))
            step(ids, (ids, torch.tensor(1.0)), weight=torch.tensor(2.0 + index))
        found.append([[], [p.detach().clone() for p in step.model.parameters()]])
    assert same(*found)


def test_a_weight_without_a_gradient_in_some_windows_keeps_its_state() -> None:
    def train(weights: str) -> list[Any]:
        step = step_of("AdamW, foreach", weights=weights)
        for index in range(6):
            step.model.get_parameter("inner.0.weight").requires_grad_(index % 2 == 0)
            run(step, 1, first=index)
        return run(step, 1, first=6)

    assert same(train("auto"), train("per_use"))


@pytest.mark.parametrize("how", ["state", "copy", "switch", "error"])
def test_a_run_goes_on_with_the_same_bits(how: str) -> None:
    def train(weights: str) -> list[Any]:
        step = step_of("AdamW, foreach", accumulate_steps=2, weights=weights)
        run(step, 3)
        if how == "state":
            saved = copy.deepcopy(step.state_dict())
            run(step, 1, first=3)
            step.load_state_dict(saved)
        elif how == "copy":
            step = copy.deepcopy(step)
        elif how == "switch":
            step.switch("O0")
        else:
            ids = torch.zeros(3, 5, dtype=torch.long)
            step(ids, (ids, torch.tensor(1.0)))
            with pytest.raises(RuntimeError):
                step(ids, (ids[:2], torch.tensor(1.0)))
        return run(step, 2, first=3)

    assert same(train("auto"), train("per_use"))


def test_no_gradient_is_left_anywhere() -> None:
    step = step_of("AdamW, foreach")
    run(step, 3)
    assert all(p.grad is None for p in step.model.parameters())
    assert all(leaf.low.grad is None for leaf in leaves_of(step)._leaves.values())


def test_the_update_is_that_of_the_capturable_optimizer_in_eager_mode() -> None:
    ours = step_of("AdamW, foreach")
    theirs = step_of("AdamW, foreach", compile=False)
    a, b = run(ours), run(theirs)
    for p, q in zip(itertools.chain(a[1]), b[1], strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-6)  # bias corrections in float32, and not in Python


def test_an_update_that_is_asked_for_needs_a_compiled_step() -> None:
    with pytest.raises(fxamp.PolicyError, match="compile=True"):
        step_of("SGD", compile=False, update="compiled")
    with pytest.raises(fxamp.PolicyError, match="update must be"):
        step_of("SGD", update="fused")


def test_a_weight_that_moves_to_another_group_is_stepped_by_its_numbers() -> None:
    def train(**settings: Any) -> list[Any]:
        torch.manual_seed(0)
        model = Tied()
        first, *others = model.parameters()
        groups: Any = [{"params": [first], "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
        optimizer = SGD(groups, lr=0.1)
        step = TrainStep(fxamp.convert(model, policy="O1,dtype=bf16"), loss_of, optimizer, **settings)
        run(step, 2)
        mine, theirs = optimizer.param_groups
        mine["params"], theirs["params"] = theirs["params"][:1], [*theirs["params"][1:], *mine["params"]]
        return run(step, 2, first=2)

    a, b = train(compile={"backend": traces}), train()
    for p, q in zip(a[1], b[1], strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_gradients_of_a_window_are_added_up_where_they_are() -> None:
    step = step_of("AdamW, foreach", accumulate_steps=3)
    run(step, 3)
    both = {
        leaf.master is step.model.get_parameter("words.weight")
        for leaf in leaves_of(step)._leaves.values()
        if leaf.both
    }
    assert both == {True}  # the tied weight alone has two gradients a micro-batch
    of = [[str(n.target) for n in gm.graph.nodes if n.op == "call_function"] for gm in GRAPHS]
    adds = sorted(len(ops) for ops in of if set(ops) == {"aten.add_.Tensor"})
    assert adds == [1, 5]  # of the first micro-batch, and of later ones


def test_no_optimizer_has_stepped_where_another_cannot_be_traced() -> None:
    def train(**settings: Any) -> tuple[list[Any], TrainStep]:
        torch.manual_seed(0)
        model = Tied()
        first, *others = model.parameters()
        optimizers = [SGD([first], lr=0.1), torch.optim.Adafactor(others, lr=0.01)]  # which reads a number
        step = TrainStep(fxamp.convert(model, policy="O1,dtype=bf16"), loss_of, optimizers, **settings)
        return run(step, 4), step

    (ours, step), (theirs, _) = train(compile={"backend": traces}), train()
    assert same(ours, theirs)
    assert step.compiled is not None
    assert "data-dependent" in step.compiled.update.eager


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", ["AdamW, foreach", "AdamW, fused", "SGD"])
def test_at_o0_a_step_that_compiles_its_loss_has_the_bits_of_eager_training(optimizer: str, accumulate: int) -> None:
    ours = run(step_of(optimizer, "O0", accumulate_steps=accumulate, compile="aot_eager"))  # and no update
    torch.manual_seed(0)
    model = Tied()
    assert same(ours, run(TrainStep(model, loss_of, OPTIMIZERS[optimizer](model), accumulate_steps=accumulate)))
