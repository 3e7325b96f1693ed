"""A tuned plan keeps its tolerance as measured, casts no more than O1, and is replayed as it was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.capture import backend
from fxamp.choose.tune import Charges
from fxamp.diagnose.step import step_of
from passes.contract.plan import CERTIFICATE
from tests.support.zoo import BY_NAME

CE = nn.functional.cross_entropy
X, Y = torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])


def batches(name: str, count: int, first: int = 3) -> list[Any]:
    made = [BY_NAME[name].inputs(first + i) for i in range(count)]
    return [kwargs or args[0] for args, kwargs in made]


def built(name: str) -> Any:
    """Return a model of the zoo; of the GPT one block, for its two are alike."""
    model: Any = BY_NAME[name].build().eval()
    if name == "gpt":
        model.blocks = model.blocks[:1]
    return model


@pytest.mark.parametrize("name", ["gpt", pytest.param("hf_bert", marks=pytest.mark.matrix)])
def test_a_plan_at_the_error_of_autocast_casts_less_and_is_replayed_as_it_was_found(name: str, tmp_path: Path) -> None:
    zoo = BY_NAME[name]
    model = built(name)
    weights = {n: p.clone() for n, p in model.named_parameters()}
    random = torch.get_rng_state()
    plan = fxamp.tune(model, batches=batches(name, 4), loss=zoo.loss)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    plan.save(tmp_path / "plan.json")
    read = fxamp.Plan.load(tmp_path / "plan.json")
    assert read.certificate == plan.certificate
    view = fxamp.convert(model, plan=read)
    seen = fxamp.measure_error(view, batches=batches(name, 4), loss=zoo.loss).policies[1]
    assert seen.per_parameter == pytest.approx(plan.certificate["measured"], rel=1e-6)
    assert (seen.casts, seen.cast_bytes) == (plan.certificate["casts"], plan.certificate["cast_bytes"])
    assert plan.certificate["measured"] <= plan.certificate["tolerance"]
    others = fxamp.measure_error(model, batches=batches(name, 4), loss=zoo.loss, policies=("autocast", "O1"))
    assert seen.cast_bytes is not None
    assert all(seen.cast_bytes <= (e.cast_bytes or 0) for e in others.policies[1:])
    assert plan.certificate["tolerance"] == pytest.approx(others["autocast"].per_parameter)
    largest = max(plan.certificate.get("predicted", 0), plan.certificate["measured"])
    assert largest * 1.02 <= others["autocast"].per_parameter or str(plan.policy).startswith("O1")
    replayed = fxamp.plan_of(view)
    assert replayed.certificate == plan.certificate
    assert sum(note.startswith(CERTIFICATE) for note in replayed.notes) == 5
    assert [d.colour for d in replayed.decisions] == [d.colour for d in plan.decisions]


def test_where_no_cut_is_as_exact_the_values_of_autocast_are_had_at_the_fewest_casts() -> None:
    """Queries, keys and values read one activation, which O1 casts for each and sums the gradients of in FP32."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            h = x + self.first(x)
            q, k, v = (row(h) for row in self.rows)
            return self.last(nn.functional.layer_norm(torch.softmax(q @ k.t(), -1) @ v, (8,)))

    torch.manual_seed(0)
    model = Attention()
    plan = fxamp.tune(model, X, Y, loss=CE)
    o1, shared = fxamp.measure_error(model, X, Y, loss=CE, policies=("O1", "O1,share_casts=storage")).policies[1:]
    assert shared.per_parameter == o1.per_parameter
    assert shared.gradient == o1.gradient
    assert (shared.casts or 0) < (o1.casts or 0)
    assert plan.certificate["cast_bytes"] <= (shared.cast_bytes or 0)


def test_a_model_that_fails_under_autocast_is_tuned_to_a_number() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            h = self.rows(x)
            scores = h @ h.t()
            mask = torch.ones_like(scores, dtype=torch.bool).triu(1)
            return self.last(torch.softmax(scores.masked_fill(mask, torch.finfo(x.dtype).min), -1) @ h)

    torch.manual_seed(0)
    model = Masked()
    with pytest.raises(fxamp.PolicyError, match=r"Masked fails under torch\.autocast .*without overflow.* give a tol"):
        fxamp.tune(model, X, Y, loss=CE)
    plan = fxamp.tune(model, X, Y, loss=CE, tolerance=0.1)
    assert 0 < plan.certificate["measured"] <= 0.1
    assert fxamp.convert(model, plan=plan)(X).isfinite().all()


@pytest.mark.parametrize("name", ["gpt", pytest.param("hf_llama", marks=pytest.mark.matrix)])
def test_a_wide_tolerance_is_met_by_the_fewest_bytes_in_states_that_were_not_captured_too(name: str) -> None:
    zoo = BY_NAME[name]
    model = built(name)
    plan = fxamp.tune(model, batches=batches(name, 2), loss=zoo.loss, tolerance=0.5)
    assert str(plan.policy).startswith("O2")
    assert plan.certificate["measured"] < 0.05
    view = fxamp.convert(model, plan=plan)
    model.train()
    args, kwargs = zoo.inputs(3)
    view(*args, **kwargs)
    assert {d.key: d.colour for d in fxamp.plan_of(view).decisions} == {d.key: d.colour for d in plan.decisions}


def test_tolerances_that_nothing_keeps_or_that_are_none_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    for wrong in (0, -1, float("nan"), float("inf"), "O1", None):
        with pytest.raises(fxamp.PolicyError, match="tolerance is"):
            fxamp.tune(model, X, Y, loss=CE, tolerance=wrong)  # type: ignore[arg-type]
    with pytest.raises(fxamp.PolicyError, match="not above the error of FP32 itself"):
        fxamp.tune(model, X, Y, loss=CE, tolerance=1e-9)
    with pytest.raises(fxamp.PolicyError, match=r"nothing keeps a tolerance of 0.0001: the nearest is .*casts of"):
        fxamp.tune(model, X, Y, loss=CE, tolerance=1e-4)


def test_plans_without_a_certificate_still_load() -> None:
    plan = fxamp.plan(nn.Linear(8, 4), (X,), policy="O1,dtype=bf16")
    data = json.loads(plan.to_json())
    assert data.pop("certificate") == {}
    assert fxamp.Plan.from_json(json.dumps(data)) == plan


class Counts(nn.Module):
    """Reads a float value for integers, as experts count their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = torch.histc(x[:, 0].detach(), bins=4, min=-2, max=2)
        ends = counts.cumsum(0, dtype=torch.int32)
        out: torch.Tensor = self.b(torch.relu(self.a(x)) * ends[-1])
        return out


def test_values_that_are_read_for_integers_need_no_gradient() -> None:
    charged = Charges(step_of(Counts(), X, Y, loss=CE), "O2", "O1")
    assert charged.square(charged.rounded("O1")) == pytest.approx(1)
    assert charged.charges["b/linear#0"] > 0


class Masked(nn.Module):
    """Attends to itself, with scores of which some are the least of FP32, and some its sum with itself: infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        scores = (h @ h.T).masked_fill(torch.ones(6, 6).triu(1) > 0, torch.finfo(torch.float32).min)
        out: torch.Tensor = self.b((scores + scores).softmax(-1) @ h)
        return out


@pytest.mark.parametrize("seed", range(4))
def test_scores_that_a_mask_makes_infinite_are_charged_nothing(seed: int) -> None:
    torch.manual_seed(seed)
    charged = Charges(step_of(Masked(), torch.randn(6, 8), Y, loss=CE), "O2", "O1")
    found = list(charged.charges.values())
    assert found
    assert all(v < 1e6 for v in found)


class AsksForGradients(nn.Module):
    """Asks for the gradient of what it makes of its input, as models do that checkpoint their first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x[:, None]
        h.requires_grad = True
        out: torch.Tensor = self.b(torch.relu(self.a(h))).squeeze(1)
        return out


def test_a_value_that_has_no_gradient_leaves_a_graph_without_one() -> None:
    charged = Charges(step_of(AsksForGradients(), X, Y, loss=CE), "O2", "O1")
    assert charged.square(charged.rounded("O1")) == pytest.approx(1)
    assert charged.charges["a/linear#0"] > 0


class Residual(nn.Module):
    """Blocks on a residual stream, whose sums hand one gradient on to both of their terms."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.rows, self.breaks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), breaks
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at, (norm, row) in enumerate(zip(self.norms, self.rows, strict=True)):
            x = x + torch.nn.functional.gelu(row(norm(x)))
            if self.breaks and at == 1:
                torch._dynamo.graph_break()
        return x


def test_a_gradient_that_a_sum_hands_on_is_charged_once() -> None:
    charged = Charges(step_of(Residual(), X, loss=mean_square), "O2", "O1")
    rounded = charged.rounded("O2")
    keys = {at for places in rounded for at in places}
    # A cut adds charges up; equal but for which of the values that share a gradient it is counted at.
    assert sum(charged.charges.get(at, 0.0) for at in keys) == pytest.approx(charged.square(rounded), rel=0.05)
    shared = [at for at in keys if at in charged._found.handed and charged._found.handed[at] != at]
    assert shared
    double = sum(charged._found.backward[at] for at in keys if at in charged._found.backward)
    once = sum(charged._found.gradients(rounded)) - sum(charged._found.forward.get(at, 0.0) for at in keys)
    assert double > 1.3 * once


def mean_square(out: torch.Tensor) -> torch.Tensor:
    return out.float().square().mean()


@pytest.mark.default_case(policy="O1,dtype=bf16")
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("policy", ["O1,dtype=bf16", "O1,dtype=bf16,share_casts=storage", "O2,dtype=bf16"])
def test_what_is_decided_on_captured_graphs_is_what_a_capture_of_its_own_gives(policy: str, breaks: bool) -> None:
    step = step_of(Residual(breaks), X, loss=mean_square)
    (batch,), settled = step.batches, step.policy(policy)
    own, casts = step.run(batch, policy), step.casts(policy)
    step.decide("decided", "O3,dtype=bf16", settled)
    found = step.run(batch, "decided")
    assert found.loss == own.loss
    assert all(torch.equal(found.gradients[n], g) for n, g in own.gradients.items())
    assert step.casts("decided") == casts


@pytest.mark.parametrize("tolerance", ["autocast", 0.02])
def test_a_search_captures_a_model_once(tolerance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, real = [], backend.rewrite

    def rewrite(*args: Any, **more: Any) -> Any:
        captured.append(1)
        return real(*args, **more)

    monkeypatch.setattr("fxamp.view.function.rewrite", rewrite)
    plan = fxamp.tune(Residual(), X, loss=mean_square, tolerance=tolerance)
    assert len(captured) == 1
    assert plan.certificate["measured"] <= plan.certificate["tolerance"] * 1.02
    compared = next(note for note in plan.notes if "compared: " in note).partition("compared: ")[2]
    names = [one.split(" at ")[0].rpartition(" ")[0] for one in compared.split(", O")]
    assert len(names) == len(set(names)) > 2


class Logging(nn.Module):
    """A linear behind a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.means = nn.Linear(64, 10), list[float]()

    def forward(self, x: Tensor) -> Tensor:
        self.means.append(float(x.mean()))
        out: Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("rows", [1, 64])
def test_casts_of_a_plan_that_is_made_in_the_middle_of_a_step_are_those_of_the_step(rows: int) -> None:
    x, y = torch.randn(rows, 64), torch.randint(10, (rows,))
    how: Any = {"loss": CE, "policies": "O1,dtype=bf16"}
    tuned = fxamp.tune(Logging(), x, y, **how).certificate
    measured = fxamp.measure_error(Logging(), x, y, **how)["O1,dtype=bf16"]
    assert (tuned["casts"], tuned["cast_bytes"]) == (measured.casts, measured.cast_bytes)
    assert fxamp.compare(Logging(), x, y, **how)
