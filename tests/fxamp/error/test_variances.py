"""What is predicted of roundings on real models is near to what the real kernels do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.diagnose.step import POLICIES, Step, step_of
from fxamp.error.rounding import error, nearest, stochastic, ulp
from fxamp.error.variances import Unrounded, moved_by
from fxamp.observe.emulation import Observer, Site
from tests.support.helpers import Layers, matrix
from tests.support.zoo import BY_NAME

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


def given(name: str, batches: int = 2) -> Step:
    zoo = BY_NAME[name]
    made = [zoo.inputs(3 + i) for i in range(batches)]
    return step_of(zoo.build().eval(), batches=[kwargs or args[0] for args, kwargs in made], loss=zoo.loss)


@pytest.mark.default_case(low=torch.float16)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_is_right_on_average_and_keeps_what_fits(low: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.randn(50), torch.randn(50) * 1e-6, torch.tensor([0.0, -0.0])])
    drawn = torch.stack([stochastic(values, low, generator) for _ in range(2000)])
    assert torch.equal(drawn, nearest(drawn, low))
    step = ulp(values, low)
    assert bool(((drawn.mean(0) - values).abs() <= 0.06 * step).all())
    assert bool(((nearest(values, low) - values).abs() <= 0.5 * step).all())
    assert torch.equal(stochastic(nearest(values, low), low, generator), nearest(values, low))
    moved = values.reshape(1, -1, 1).expand(3, -1, 2).clone().transpose(0, 2)
    assert stochastic(moved, low, generator).stride() == moved.stride()  # on which graphs are guarded
    beyond = stochastic(torch.tensor([float("inf"), float("nan")]), low, generator)
    kinds = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32)  # CUDA's first
    assert all(bool(stochastic(kinds, low, generator).to(low).isnan().all()) for _ in range(20))
    assert beyond[0] == float("inf")
    assert beyond.isnan()[1]


@pytest.mark.default_case(low=torch.bfloat16)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_masks_are_not_rounded(low: torch.dtype) -> None:
    lowest = torch.finfo(torch.float32).min
    assert error(torch.tensor([lowest, -lowest, -torch.inf, torch.inf, 0.0, 1.5]), low).tolist() == [0.0] * 6
    assert error(torch.tensor([1 + 2.0**-12]), low).tolist() == [-(2.0**-12)]


def test_a_row_that_is_masked_whole_makes_no_infinite_error() -> None:
    def masked(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        scores = (self.k(x) @ x.mT + self.bias).masked_fill(mask, torch.finfo(torch.float32).min)
        return (torch.softmax(scores, -1) @ self.v(x)).square().mean()

    torch.manual_seed(0)
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1] = True
    given = torch.randn(2, 4, 8), mask
    k, v, bias = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.randn(4, 4))  # FP32, so that at O1 scores are
    found = fxamp.estimate_error(Layers(masked, k=k, v=v, bias=bias), given, policies=("O1", "O2"))
    assert all(0 < e.loss < 0.1 for e in found.policies)


@pytest.mark.parametrize("name", ["resnet18", *matrix("hf_bert", "hf_t5")])
def test_a_graph_without_its_casts_computes_what_the_model_computes(name: str) -> None:
    step = given(name, 1)
    batch = step.batches[0]
    seen: list[Site] = []

    def at(site: Site, value: Tensor) -> Tensor:
        seen.append(site)
        return value

    expected, got = step.run(batch, "FP32"), step.run(batch, "O2", Observer(at))
    assert got.loss == pytest.approx(expected.loss, rel=1e-6)
    for key, gradient in expected.gradients.items():
        assert torch.allclose(got.gradients[key], gradient, rtol=1e-3, atol=1e-6), key
    assert {s.key for s in seen if s.rounds} <= {d.key for d in fxamp.plan_of(step.view("O2")).decisions}


def test_everything_is_as_before() -> None:
    zoo = BY_NAME["resnet18"]
    model = zoo.build().train()
    model(torch.randn(2, 3, 40, 48)).sum().backward()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    gradients: list[Any] = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    found = fxamp.estimate_error(model, zoo.inputs(2)[0], loss=zoo.loss, policies=("O1",))
    assert found["O1"].loss > 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))  # type: ignore[arg-type]
    assert torch.equal(random, torch.get_rng_state())


def stepped(p: Tensor) -> None:
    assert p.grad is not None
    p.data.sub_(p.grad)


@pytest.mark.parametrize("diagnose", [fxamp.estimate_error, fxamp.measure_error])
def test_parameters_that_a_step_writes_are_as_before_after_many_steps(diagnose: Any) -> None:
    def writes(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.mul_(0.5)
        return self.b(self.a(x)).mean()

    model: Any = Layers(writes, a=nn.Linear(8, 8), b=nn.Linear(8, 1))
    model.b.weight.register_post_accumulate_grad_hook(stepped)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    diagnose(model, batches=[torch.randn(4, 8) for _ in range(3)], policies=("O1", "O2"))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_buffer_that_a_step_writes_is_in_no_graph_of_autograd_afterwards() -> None:
    def follows(self: Any, x: Tensor) -> Tensor:
        """Keep a moving average of what was computed, and read it in the same step."""
        made = self.a(x)
        self.average.mul_(0.9).add_(made.detach().float().mean(0), alpha=0.1)
        return (made - self.average).square().mean()

    model, x = Layers(follows, a=nn.Linear(8, 4), average=torch.zeros(4)), torch.randn(5, 8)
    fxamp.estimate_error(model, x, gradients="nodes", policies="O1")
    assert not model.get_buffer("average").requires_grad
    fxamp.tune(model, x, policy="O2,dtype=bf16")
    for _ in range(2):
        model(x).backward()


def test_sparse_gradients_and_parameters_without_dimensions_are_taken() -> None:
    def looked(self: Any, ids: Tensor) -> Tensor:
        return (self.head(self.words(ids)) * self.scale).float().square().mean()

    words, scale = nn.Embedding(9, 8, sparse=True), nn.Parameter(torch.ones(()))
    model, ids = Layers(looked, words=words, head=nn.Linear(8, 4), scale=scale), torch.arange(6)
    assert any(row.op == "embedding" for row in fxamp.census(model, ids).ran)
    errors = fxamp.measure_error(model, ids, policies="O1")["O1"].parameters
    assert errors.keys() == {"words.weight", "head.weight", "head.bias", "scale"}
    assert errors["words.weight"] > 0
    assert fxamp.tune(model, ids).certificate["measured"] > 0
    assert fxamp.calibrate(model, ids).values


def test_a_model_of_which_nothing_trains_is_verified() -> None:
    model = nn.Sequential(nn.Linear(8, 4)).requires_grad_(False)
    found = fxamp.measure_error(model, torch.randn(3, 8), loss=lambda out: out.float().square().mean(), policies="O1")
    assert found["O1"].loss > 0


def test_a_model_with_converted_parts_is_refused() -> None:
    model = Layers(lambda m, x: m.part(x).mean(), part=fxamp.convert(nn.Linear(8, 4)))
    with pytest.raises(fxamp.PolicyError, match="'part' is converted already"):
        fxamp.estimate_error(model, torch.randn(2, 8))
    with pytest.raises(fxamp.PolicyError, match="rounds nothing"):
        fxamp.estimate_error(nn.Sequential(nn.Linear(8, 1), nn.Flatten(0)), torch.randn(1, 8), policies=["O0"])


@pytest.mark.parametrize("name", [pytest.param("hf_bert", marks=pytest.mark.matrix), "gpt"])
def test_a_step_that_rounds_nothing_gives_each_policy_what_its_own_graphs_give(name: str) -> None:
    whole = given(name, 1)
    steps = Unrounded(whole, POLICIES)
    assert list(steps.runs.values()) == [list(POLICIES)]
    steps.run(next(iter(steps.runs)), whole.batches[0], [])
    for policy in ("O2", "O3"):
        expected = {moved.site.place: moved for moved in moved_by(given(name, 1), policy)}
        got = {moved.site.place: moved for moved in steps.moved(policy)}
        assert got.keys() == expected.keys()
        for place, moved in expected.items():
            assert got[place].variance == pytest.approx(moved.variance, rel=1e-3, abs=1e-18), (policy, place)
            assert got[place].signed == pytest.approx(moved.signed, rel=1e-2, abs=1e-7), (policy, place)
