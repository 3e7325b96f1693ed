"""What a diagnostic is given is read in one way, and what cannot be read is refused with the way out."""

from __future__ import annotations

import collections
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.diagnose.step import step_of
from fxamp.errors import NotAModuleError
from passes.contract.errors import CaptureError, PolicyError
from tests.support.helpers import Layers

X, Y = torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])
CE = nn.functional.cross_entropy


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4))


def test_inputs_batches_and_steps_give_the_same_batches() -> None:
    model = net()
    step = fxamp.TrainStep(model, CE, torch.optim.SGD(model.parameters(), lr=0.1))
    for found in (
        step_of(model, X, Y, loss=CE),
        step_of(model, batches=iter([(X, Y)]), loss=CE),
        step_of(model, batches=[[X, Y]], loss=CE),
        step_of(step, X, Y),
    ):
        (batch,) = found.batches
        assert batch[0] is X
        assert batch[1] is Y
        assert torch.equal(found.call(model, batch)[1], CE(model(X), Y))
    assert step_of(step, X).train_step is step


class Scalars(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.sum(), x.mean()


class Whole(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(loss=x)


def test_what_is_no_step_is_refused_with_the_way_out() -> None:
    model = net()
    step = fxamp.TrainStep(model, CE, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(NotAModuleError, match="not function"):
        step_of(lambda x: x, X)
    with pytest.raises(CaptureError, match="to_empty"):
        step_of(net().to("meta"), X)
    with pytest.raises(PolicyError, match="leave out loss"):
        step_of(step, X, Y, loss=CE)
    with pytest.raises(PolicyError, match="in their place"):
        step_of(model)
    with pytest.raises(PolicyError, match="in their place"):
        step_of(model, X, batches=[X])
    with pytest.raises(PolicyError, match="pairs"):
        step_of(model, None, Y, batches=[X], loss=CE)
    with pytest.raises(PolicyError, match="empty"):
        step_of(model, batches=[])
    for module, loss, text in (
        (model, None, "has no loss: give loss="), (Scalars(), None, "2 scalars, any of which may be the loss"),
        (Whole(), None, r"shape \(6, 8\)"), (model, lambda out: out, r"not one of shape \(6, 4\)"),
    ):  # fmt: skip
        given = step_of(module, X, loss=loss)
        with pytest.raises(PolicyError, match=text):
            given.call(module, given.batches[0])


class LossWithWeights(nn.Module):
    """A loss with a parameter, and a buffer that it counts in."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor) -> Tensor:
        self.calls += 1
        return (output * self.gain).square().mean()


@pytest.mark.parametrize(
    "diagnose",
    [
        fxamp.measure_error, fxamp.estimate_error, fxamp.tune, fxamp.calibrate, fxamp.find_overflow, fxamp.compare,
        fxamp.census,
    ],
)  # fmt: skip
def test_a_loss_that_is_a_module_is_as_before_and_so_is_what_autograd_saved(diagnose: Any) -> None:
    model, loss = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), LossWithWeights()
    x = torch.randn(6, 8)
    before = loss(model(x))
    loss.calls.zero_()
    view = fxamp.convert(model, policy="O1,dtype=fp16") if diagnose is fxamp.find_overflow else model
    diagnose(view, x, loss=loss)
    assert loss.gain.grad is None
    assert loss.calls == 0
    before.backward()  # nothing that it needs was written
    assert all(p.grad is not None for p in model.parameters())


def test_flags_that_a_step_changes_are_as_before() -> None:
    def freezes(self: Any, x: Tensor) -> Tensor:
        self.a.weight.requires_grad_(False)
        return self.b(self.a(x))

    model: Any = Layers(freezes, a=nn.Linear(8, 8), b=nn.Linear(8, 1))
    fxamp.measure_error(model, torch.randn(4, 8), loss=torch.mean, policies="O1")
    assert model.a.weight.requires_grad


# One convention of arguments, for all diagnostics.

DIAGNOSTICS: dict[str, Any] = {
    "census": fxamp.census, "estimate": fxamp.estimate_error, "measure": fxamp.measure_error, "tune": fxamp.tune,
    "calibrate": fxamp.calibrate, "overflow": fxamp.find_overflow, "compare": fxamp.compare,
}  # fmt: skip


def named(name: str) -> Any:
    """A diagnostic, and what it needs besides to be one of a model that is not converted."""
    return DIAGNOSTICS[name], {"policies": "O1,dtype=bf16"} if name in ("census", "overflow") else {}


class Scaled(nn.Module):
    """Takes a positional input and one by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        out: Tensor = self.fc(x) * scale
        return out


@pytest.mark.parametrize("name", DIAGNOSTICS)
def test_inputs_may_be_positional_and_keyword_at_once(name: str) -> None:
    diagnose, more = named(name)
    diagnose(Scaled(), X, Y, kwargs={"scale": torch.tensor(2.0)}, loss=CE, **more)
    diagnose(Scaled(), X, Y, kwargs={"scale": torch.tensor(2.0)}, loss=CE, **more)


class Endless:
    """A loader without an end, which knows how much of it was read."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Any:
        while True:
            self.read += 1
            yield torch.randn(6, 8), Y


@pytest.mark.filterwarnings("ignore:only the first 8 batches were searched")
@pytest.mark.parametrize("name", DIAGNOSTICS)
def test_of_an_endless_loader_as_many_batches_are_taken_as_are_needed(name: str) -> None:
    diagnose, more = named(name)
    endless = Endless()
    diagnose(net(), batches=endless, loss=CE, **more)
    assert 1 <= endless.read <= 8


def test_batches_are_taken_one_after_the_other() -> None:
    source = Endless()
    given = step_of(net(), batches=source, loss=CE)
    assert source.read == 1
    for number, _ in enumerate(given.batches, 1):
        assert source.read == number
    assert [source.read, len(given.batches)] == [8, 8]
    assert len(step_of(net(), batches=[(X, Y)] * 20, loss=CE).batches) == 20


def test_of_an_endless_loader_exactly_as_many_batches_are_taken_as_are_asked_for() -> None:
    source = Endless()
    found = fxamp.measure_error(net(), batches=itertools.islice(source, 12), loss=CE, policies="O1")
    assert [found.batches, source.read] == [12, 12]
    assert len(step_of(net(), batches=collections.deque([(X, Y)] * 9), loss=CE).batches) == 9


class Noisy(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, at: int) -> Any:
        return torch.full((8,), float(at)) + torch.randn(8), at % 4


@pytest.mark.parametrize("own", [False, True])
def test_a_loader_its_sampler_and_the_generators_are_as_before(own: bool) -> None:
    generator = torch.Generator().manual_seed(3) if own else None
    loader = torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True, generator=generator)
    torch.manual_seed(5)
    expected = [x.clone() for x, _ in loader]
    torch.manual_seed(5)
    if generator is not None:
        generator.manual_seed(3)
    found = step_of(net(), batches=loader, loss=CE).batches
    fxamp.measure_error(net_of_seed(), batches=loader, loss=CE, policies="O1")
    assert len(found) == 8
    assert not torch.equal(found[0][0], found[1][0])
    torch.manual_seed(5)  # for the model that was made
    assert all(torch.equal(a, x) for a, (x, _) in zip(expected, loader, strict=True))


def net_of_seed() -> nn.Module:
    with torch.random.fork_rng():
        return net()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        out: Tensor = self.a(x) + self.b(z)
        return out


def test_two_inputs_are_told_from_inputs_and_target_by_the_signature_of_the_model() -> None:
    (two,) = step_of(Two(), batches=[(X, X)], loss=torch.mean).batches
    assert (len(two[0]), two[1]) == (2, None)
    (three,) = step_of(Two(), batches=[[X, X, Y]], loss=CE).batches
    assert (len(three[0]), three[1] is Y) == (2, True)
    (pair,) = step_of(Two(), batches=[((X, X), Y)], loss=CE).batches
    assert (len(pair[0]), pair[1] is Y) == (2, True)
    fxamp.measure_error(Two(), batches=[(X, X)], loss=lambda out: out.square().mean(), policies="O1")


@pytest.mark.parametrize("name", DIAGNOSTICS)
def test_a_batch_that_the_model_refuses_raises_its_own_error_and_changes_nothing(name: str) -> None:
    diagnose, more = named(name)
    model = net()
    batches = [(X, Y), (X, Y), (torch.randn(6, 9), Y), (X, Y)]
    before, state = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|shape"):
        diagnose(model, batches=batches, loss=CE, **more)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", DIAGNOSTICS)
def test_a_policy_with_a_typo_is_named(name: str) -> None:
    with pytest.raises(PolicyError, match="O9"):
        DIAGNOSTICS[name](net(), X, Y, loss=CE, policies="O9")


def test_two_equal_policies_are_one_row() -> None:
    found = fxamp.measure_error(net(), X, Y, loss=CE, policies=("O1", "O1"))
    assert [e.policy for e in found.policies] == ["FP32", "O1"]


@pytest.mark.parametrize(("before", "now"), [("verify", "measure_error"), ("advise", "compare"), ("bisect", "tune")])
def test_a_name_of_before_warns_of_the_new_one(before: str, now: str) -> None:
    more = {"metric": lambda view: 0.0, "bound": 1.0} if before == "bisect" else {}
    with pytest.warns(DeprecationWarning, match=f"fxamp.{now}"):
        getattr(fxamp, before)(net(), X, Y, loss=CE, **more)


# What all results have.


def test_every_result_says_what_to_do_and_is_json_markdown_and_shown_in_a_notebook() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(1e6)
    found = {
        "census": fxamp.census(net(), X, Y, loss=CE, policies="O1,dtype=bf16"),
        "estimate": fxamp.estimate_error(net(), X, Y, loss=CE),
        "measure": fxamp.measure_error(net(), X, Y, loss=CE),
        "calibrate": fxamp.calibrate(net(), X, Y, loss=CE),
        "overflow": fxamp.find_overflow(model, X, Y, loss=CE, policies="O1,dtype=fp16"),
        "compare": fxamp.compare(net(), X, Y, loss=CE, policies=("O1", "O2")),
    }  # fmt: skip
    for name, result in found.items():
        made: Any = result
        assert json.loads(made.to_json())["version"], name
        assert made._repr_html_().startswith("<pre"), name
        assert made.to_markdown().count("\n") >= str(made).count("\n") - 2, name
        assert hasattr(made, "policy") or hasattr(made, "plan"), name
    for name in ("estimate", "measure", "compare"):
        with pytest.raises(PolicyError, match=r"has no 'O7'; it has .*O1"):
            found[name]["O7"]  # type: ignore[index]
    overflow: Any = found["overflow"]
    assert fxamp.find_overflow(model, X, Y, loss=CE, policies=overflow.policy) is None
    errors: Any = found["measure"]
    assert fxamp.convert(net(), (X,), policy=errors.policy)(X).isfinite().all()
    rows: Any = found["compare"]
    assert [option.name for option in rows.options] == ["FP32", "autocast", "O1", "O2"]


def test_tables_have_no_empty_column_and_policies_that_round_the_same_are_one_row() -> None:
    estimated = str(fxamp.estimate_error(net(), X, Y, loss=CE))
    measured = str(fxamp.measure_error(net(), X, Y, loss=CE))
    assert "casts" not in estimated
    assert "increase" not in measured
    assert "autocast, O1, O2, O3" in estimated
    assert "autocast, O1, O2, O3: of the loss" in estimated


def test_a_census_says_first_how_much_ran_in_16_bits_and_what_did_not() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    found = fxamp.census(model, X, Y, loss=CE, policies="O1,dtype=bf16,modules.1=fp32")
    first = str(found).splitlines()[0]
    assert "57.1 % of FLOPs in 16 bits; in FP32, as planned: 1/linear#0 42.9 %" in first  # 128 of 224 products
