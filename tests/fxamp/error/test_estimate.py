"""Predicted errors are near measured ones, on real models; culprits, dead parameters and flips are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.diagnose.step import Outcome, step_of
from fxamp.error.derivatives import Derivatives, keys_of
from fxamp.error.estimate import estimated
from fxamp.error.rounding import stochastic
from fxamp.observe.emulation import Observer, Site
from passes.contract.errors import CaptureError, PolicyError
from tests.support.helpers import matrix
from tests.support.small import NormByHand
from tests.support.zoo import BY_NAME

CE = nn.functional.cross_entropy


def batches(name: str, count: int, first: int = 3) -> list[Any]:
    made = [BY_NAME[name].inputs(first + i) for i in range(count)]
    return [kwargs or args[0] for args, kwargs in made]


@pytest.mark.parametrize("name", ["unet", *matrix("hf_bert", "hf_llama")])
def test_predictions_are_near_measurements_on_other_batches(name: str) -> None:
    zoo = BY_NAME[name]
    model = zoo.build().eval()
    predicted = fxamp.estimate_error(model, batches=batches(name, 3), loss=zoo.loss, policies=("O1", "O2"))
    measured = fxamp.measure_error(model, batches=batches(name, 8, 10), loss=zoo.loss, policies=("O1", "O2"))
    for policy in ("O1", "O2"):
        ours, true = predicted[policy], measured[policy]
        assert true.loss / 3 < ours.loss < true.loss * 3
        assert true.gradient / 2 < ours.gradient < true.gradient * 2
        assert true.per_parameter / 2 < ours.per_parameter < true.per_parameter * 2
        assert sum(node.share for node in ours.nodes) == pytest.approx(1)
        assert {node.key for node in ours.nodes} <= {d.key for d in fxamp.plan(
            model, *zoo.inputs(3), policy=f"{policy},dtype=bf16").decisions}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["gpt", *(pytest.param(n, marks=pytest.mark.matrix) for n in ("hf_bert", "hf_llama", "hf_vit"))]
)
def test_what_nodes_add_to_the_error_of_gradients_is_the_whole(name: str) -> None:
    zoo = BY_NAME[name]
    step = step_of(zoo.build().eval(), batches=batches(name, 2), loss=zoo.loss)
    derived = Derivatives(step, "O2")
    for policy in ("O1", "O2"):
        found = estimated(step, (policy,), gradients="nodes")[policy]
        variance = sum(derived.gradients(map(keys_of, step.rounding(policy)))) / 2  # of two batches
        assert (variance / len(found.parameters)) ** 0.5 == pytest.approx(found.per_parameter, rel=0.15)
        assert sum(node.gradient or 0 for node in found.nodes) == pytest.approx(1)
        assert sum(found.by("module", of="gradient").values()) == pytest.approx(1)
        assert found.nodes[0].key in str(found)


def test_what_nodes_add_is_relative_to_the_gradients_of_all_batches() -> None:
    """A batch that is fitted has errors as large as its gradients; of the errors of all batches it is a small part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    x, y = torch.randn(2, 64, 16), torch.randn(64, 4)
    fitted = model(x[1]).detach() + 0.01 * torch.randn(64, 4)
    step = step_of(model, batches=[(x[0], y), (x[1], fitted)], loss=nn.functional.mse_loss)
    found = estimated(step, ("O1",))["O1"]
    derived = Derivatives(step, "O2")
    variance = sum(derived.gradients(map(keys_of, step.rounding("O1")))) / 2
    assert (variance / len(found.parameters)) ** 0.5 == pytest.approx(found.per_parameter, rel=0.3)


def test_nodes_add_to_the_error_of_gradients_what_they_alone_make_of_it() -> None:
    """Where an override keeps one module FP32, what is gone of the variance is what its nodes added."""
    zoo = BY_NAME["gpt"]
    model = zoo.build().eval()
    policies = ("O1", "O1,modules.head=fp32")
    found = fxamp.estimate_error(model, batches=batches("gpt", 2), loss=zoo.loss, policies=policies, gradients="nodes")
    head = found["O1"].by("module", of="gradient")["head"]
    kept = (found[policies[1]].per_parameter / found["O1"].per_parameter) ** 2
    assert 1 - kept == pytest.approx(head, abs=0.1)


def test_another_kind_of_gradients_is_refused() -> None:
    with pytest.raises(fxamp.PolicyError, match='True, False or "nodes"'):
        fxamp.estimate_error(nn.Linear(4, 2), torch.randn(3, 4), loss=torch.sum, gradients="lines")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.key = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.value, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights = torch.softmax(self.query(h) @ self.key(h).mT / 4, -1)
        return x + self.out(weights @ self.value(h))


def test_autocast_is_predicted_as_o1_and_dead_parameters_are_listed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention(), nn.Linear(16, 5))
    found = fxamp.estimate_error(
        model, torch.randn(8, 6, 16), torch.randint(5, (8,)), loss=lambda out, y: CE(out.mean(1), y)
    )
    assert [e.policy for e in found.policies] == ["autocast", "O1", "O2", "O3"]
    assert found["autocast"].loss == found["O1"].loss
    assert list(found.dead) == ["0.key.bias", "1.key.bias"]
    assert not set(found.dead) & set(found["O1"].parameters)
    assert "bias" in str(found)
    assert next(iter(found["O2"].by("module").values())) < 0.5


@pytest.mark.parametrize("gradients", [True, False])
def test_one_backward_a_batch_rounds_nothing_for_all_policies_and_one_rounds_for_each(gradients: bool) -> None:
    backwards: list[Tensor] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        made: Tensor = CE(output, target)
        made.register_hook(backwards.append)
        return made

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    batches = [(torch.randn(64, 8), torch.randint(4, (64,))) for _ in range(3)]
    found = fxamp.estimate_error(model, batches=batches, loss=loss, gradients=gradients)
    assert len(backwards) == len(batches) * (4 if gradients else 1)  # autocast rounds what O1 rounds
    assert found["O3"].loss > 0
    assert (found["O3"].gradient > 0) == gradients


class Router(nn.Module):
    def __init__(self, by: str) -> None:
        super().__init__()
        self.gate, self.experts, self.by = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 8, 5)), by

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        weights, chosen = scores.topk(1, dim=-1) if self.by == "topk" else scores.max(dim=-1, keepdim=True)
        out = (x[:, None, None] @ self.experts[chosen]).squeeze(2)
        return (out * weights.softmax(-1)[..., None]).sum(1)


@pytest.mark.parametrize("by", ["topk", "max"])
def test_choices_of_a_router_are_expected_to_flip_beside_the_variance(by: str) -> None:
    x, y = torch.randn(512, 8), torch.randint(5, (512,))
    model = Router(by)
    found = fxamp.estimate_error(model, x, y, loss=CE, policies="O1")
    ((key, flips),) = found["O1"].flips.items()
    assert key == f"/{by}#0"
    with torch.autocast("cpu", torch.bfloat16):
        low = model.gate(x).argmax(-1)
    changed = int((low != model.gate(x).argmax(-1)).sum())
    assert changed / 4 <= flips <= changed * 4 + 2


def test_a_parameter_below_its_noise_is_flagged() -> None:
    class Cancels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, x: Tensor) -> Tensor:  # the mean of many large terms that cancel nearly
            h = self.a(x)
            return (self.b(h) - self.b(h + 1e-5)).mean() + h.mean()

    found = fxamp.estimate_error(Cancels(), torch.randn(4, 64), policies="O3")
    assert "b.weight" in found["O3"].flagged


def test_random_numbers_are_the_same_on_both_sides() -> None:
    zoo = BY_NAME["gpt"]
    model = zoo.build().train()
    given = {"batches": batches("gpt", 4), "loss": zoo.loss, "policies": ("O1",)}
    predicted, measured = fxamp.estimate_error(model, **given), fxamp.measure_error(model, **given)  # type: ignore[arg-type]
    assert measured["O1"].gradient < 0.05
    assert predicted["O1"].gradient == pytest.approx(measured["O1"].gradient, rel=0.5)


class Sized(nn.Module):
    """A net whose gradients have a size of their own."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return CE(self.net(x), x[:, 0].gt(0).long()) * self.factor


@pytest.mark.parametrize("factor", [1e-7, *matrix(1.0, 1e3)])  # below FP16's least number; too large to scale
def test_gradients_in_fp16_are_predicted_with_a_scaled_loss_as_they_are_measured(factor: float) -> None:
    batches = [torch.randn(16, 32) for _ in range(4)]
    policies = ("O1,dtype=fp16", "O2,dtype=fp16")
    model = Sized(factor)
    predicted = fxamp.estimate_error(model, batches=batches, policies=policies)
    measured = fxamp.measure_error(model, batches=batches, policies=policies)
    for policy in policies:
        assert measured[policy].gradient < 3e-3
        assert predicted[policy].gradient == pytest.approx(measured[policy].gradient, rel=0.5)
        assert predicted[policy].per_parameter == pytest.approx(measured[policy].per_parameter, rel=0.5)


def test_a_scale_is_halved_until_gradients_are_finite_and_changes_nothing_else() -> None:
    batch = (torch.randn(16, 32), None)
    step = step_of(Sized(8.0), batches=[batch])
    kept: list[Outcome] = [step.run(batch, "O1,dtype=fp16", Observer(), scale=s) for s in (1.0, 2.0**16)]
    assert all(torch.equal(kept[0].gradients[n], kept[1].gradients[n]) for n in kept[0].gradients)
    assert step.scale("O1,dtype=fp16") == 2.0**16
    assert step.scale("O1,dtype=bf16") == step.scale("FP32") == 1.0
    tried: list[float] = []

    def run(scale: float) -> Outcome:
        tried.append(scale)
        return Outcome(1.0, {"w": torch.tensor(float("inf") if scale > 2.0**14 else 1.0)}, None)

    for _ in range(2):
        step.scaled("O1,dtype=fp16", run)
    assert tried == [2.0**16, 2.0**15, 2.0**14, 2.0**14]  # the next batch begins where this one ended


LOW = "O2,ops.add=low"  # a state in 16 bits


class Euler(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.rate, self.steps = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)), steps

    def forward(self, h: Tensor) -> Tensor:
        for _ in range(self.steps):
            h = h + self.rate(h) / self.steps
        return h.square().mean()


@pytest.mark.parametrize("verified", [False, *matrix(True)])  # which takes long
def test_small_updates_of_a_large_low_state_are_lost_all_alike(verified: bool) -> None:
    model, given = Euler(200), {"batches": [torch.randn(8, 16) + 2 for _ in range(2)], "policies": ("autocast", LOW)}
    predicted = fxamp.estimate_error(model, gradients=False, **given)  # type: ignore[arg-type]
    if verified:
        measured = fxamp.measure_error(model, **given)  # type: ignore[arg-type]
        assert measured[LOW].loss > 50 * measured["autocast"].loss  # which keeps the state in FP32, as O2 does
        assert predicted[LOW].loss == pytest.approx(measured[LOW].loss, rel=0.5)
    assert predicted["autocast"].loss < predicted[LOW].loss / 20
    assert len(predicted[LOW].swamped) == 200
    assert predicted["autocast"].swamped == {}
    assert "Most updates are lost" in str(predicted)
    coarse = fxamp.estimate_error(Euler(4), gradients=False, **given)  # type: ignore[arg-type]
    assert coarse[LOW].swamped == {}


class Odd(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.b, self.last = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.how == "checkpoint":
            h = checkpoint(lambda t: torch.tanh(self.b(t)), h, use_reentrant=False)
        elif self.how == "break":
            torch._dynamo.graph_break()
            h = torch.tanh(self.b(h))
        else:
            h = torch.cond(h.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (self.b(h),))
        out: Tensor = self.last(h)
        return out


@pytest.mark.parametrize("how", ["break", "cond", *matrix("checkpoint")])
def test_bodies_and_graph_breaks_are_looked_into(how: str) -> None:
    model = Odd(how)
    batches = [(torch.randn(64, 8), torch.randint(4, (64,))) for _ in range(4)]
    given: dict[str, Any] = {"batches": batches, "loss": CE, "policies": ("O1", "O2")}
    predicted, measured = fxamp.estimate_error(model, **given), fxamp.measure_error(model, **given)
    for policy in ("O1", "O2"):
        assert measured[policy].gradient / 2 < predicted[policy].gradient < measured[policy].gradient * 2
    what = {node.key for node in predicted["O2"].nodes}
    assert {"a/linear#0", "b/linear#0", "last/linear#0"} <= what


class Chain(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.last, self.breaks = nn.Linear(16, 64), nn.Linear(64, 4), breaks

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        for _ in range(6):
            h = torch.tanh(h) * 1.3 + h * 0.1
        out: Tensor = self.last(h)
        return out


def test_a_value_crosses_a_break_as_planned_and_what_is_behind_it_rounds_as_without_the_break() -> None:
    batches, found = [(torch.randn(64, 16), torch.randint(4, (64,))) for _ in range(3)], dict[bool, Any]()
    for breaks in (False, True):
        torch.manual_seed(0)
        step = step_of(Chain(breaks), batches=batches, loss=CE)
        found[breaks] = estimated(step, ("O1",))["O1"]
        before = len(fxamp.graphs(step.view("O1")))
        step.run(step.batches[0], "O1")
        assert len(fxamp.graphs(step.view("O1"))) == before == 1 + breaks  # the real run has no graphs of its own
    whole, parts = found[False], found[True]
    assert {(n.key, n.what.partition(" of ")[0]) for n in whole.nodes} == {
        (n.key, n.what.partition(" of ")[0]) for n in parts.nodes
    }
    assert parts.loss == pytest.approx(whole.loss, rel=0.1)
    assert parts.per_parameter == pytest.approx(whole.per_parameter, rel=0.1)
    assert fxamp.tune(Chain(True), batches=batches, loss=CE).certificate["measured"] > 0


class Sums(nn.Module):
    """A mean over rows by a kernel that adds up in 16 bits, value after value; or a norm that does so in backward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.how = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).sigmoid()
        rows, at = h.new_zeros(4, 32), torch.arange(len(x)) % 4
        if self.how == "norm":
            rows = self.norm(h).unflatten(0, (-1, 4)).sum(0)
        elif self.how == "in place":
            rows.index_put_((at,), h, accumulate=True)
        else:
            rows = rows.index_put((at,), h, accumulate=True)
        out: Tensor = self.last(rows * (4 / len(x)))
        return out


@pytest.mark.parametrize("how", ["norm", "sum", "in place"])
def test_sums_of_4096_rows_in_16_bits_are_predicted_as_kernels_make_them(how: str) -> None:
    torch.manual_seed(0)
    model, batches = Sums(how), [(torch.randn(4096, 16), torch.arange(4)) for _ in range(3)]
    given: Any = {"batches": batches, "loss": CE, "policies": "O1,dtype=bf16"}
    predicted = fxamp.estimate_error(model, **given).policies[0]
    measured = fxamp.measure_error(model, **given).policies[1]
    assert measured.per_parameter > 0.1  # as under autocast: rounded once it is below 0.01
    assert measured.per_parameter / 2 < predicted.per_parameter < measured.per_parameter * 2
    if how != "norm":
        assert measured.loss > 3e-3
        assert measured.loss / 2 < predicted.loss < measured.loss * 2


class Spectrum(nn.Module):
    """The head of a vocoder: numbers of a spectrum, by magnitude and phase or as they are, and their signal."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(16, 16), nn.Linear(16, 18), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(torch.tanh(self.first(x)))
        if self.how == "fft":
            return torch.fft.rfft(h.float()).abs().square()
        real, imaginary = h.float().chunk(2, -1)
        spectrum = torch.polar(real.exp(), imaginary) if self.how == "polar" else torch.complex(real, imaginary)
        signal: Tensor = torch.fft.irfft(spectrum, n=16)
        return signal


@pytest.mark.parametrize("how", ["complex", *matrix("fft", "polar")])
def test_gradients_that_come_through_complex_values_are_predicted(how: str) -> None:
    torch.manual_seed(0)
    given: dict[str, Any] = {"loss": lambda y: (y.float() - 1).square().mean(), "policies": "O1,dtype=bf16"}
    model, batches = Spectrum(how), [(torch.randn(64, 16),) for _ in range(8)]
    predicted = fxamp.estimate_error(model, batches=batches[:3], **given).policies[0]
    measured = fxamp.measure_error(model, batches=batches, **given).policies[-1]
    assert measured.gradient / 2 < predicted.gradient < measured.gradient * 2
    assert measured.loss / 3 < predicted.loss < measured.loss * 3


def test_graphs_and_compiled_views_are_predicted_too() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x, y = torch.randn(64, 8), torch.randint(4, (64,))
    expected = fxamp.estimate_error(model, x, y, loss=CE, policies="O1")["O1"]
    graph = torch.fx.symbolic_trace(model)
    view = fxamp.convert(model, policy="O2", backend="inductor")
    for given in (graph, view):
        found = fxamp.estimate_error(given, x, y, loss=CE, policies="O1")["O1"]
        assert found.loss == pytest.approx(expected.loss)


def test_what_takes_other_paths_in_later_batches_is_predicted_too() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.gain = nn.Linear(8, 32), nn.Linear(32, 8), nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            h = x * self.gain
            if context is not None:
                h = h + self.b(nn.functional.gelu(self.a(context)))
            return h.square().mean()

    plain: dict[str, Tensor] = {"x": torch.randn(4, 8)}
    whole = [{"x": torch.randn(4, 8), "context": torch.randn(4, 8)} for _ in range(7)]
    found = [fxamp.estimate_error(Either(), batches=b, policies="O1")["O1"] for b in ([plain, *whole], [*whole, plain])]
    measured = fxamp.measure_error(Either(), batches=[plain, *whole], policies="O1")["O1"]
    assert {n.key for n in found[0].nodes} == {n.key for n in found[1].nodes} > {"a/linear#0"}
    assert all(measured.loss / 3 < errors.loss < measured.loss * 3 for errors in found)
    assert measured.casts


class Checkpointed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


@library.custom_op("test_estimate::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Double a value, of 16 bits alone."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"16 bits alone, and not {x.dtype}")
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda _, grad: grad * 2)


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(doubled(h) if h.dtype != torch.float32 else h * 2).square().mean()


def test_an_op_that_takes_16_bits_alone_is_run_in_those() -> None:
    torch.manual_seed(0)
    model, x = Doubling(), torch.randn(4, 8)
    predicted = fxamp.estimate_error(model, x, policies=("O1", "O2"), gradients="nodes")
    measured = fxamp.measure_error(model, x, policies=("O1", "O2"))
    for policy in ("O1", "O2"):
        assert measured[policy].gradient / 3 < predicted[policy].gradient < measured[policy].gradient * 3
    assert fxamp.tune(model, x).certificate["measured"] == pytest.approx(measured["O1"].per_parameter)


@pytest.mark.parametrize("kind", [nn.Sequential, Checkpointed])
def test_statistics_of_a_batch_norm_have_no_gradient(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).eval()
    given: Any = {"loss": nn.functional.cross_entropy, "inputs": torch.randn(8, 8), "target": torch.arange(8) % 4}
    found = fxamp.estimate_error(model, **given, policies="O1", gradients="nodes")["O1"]
    assert any(node.key == "3/linear#0" and node.gradient for node in found.nodes)
    assert fxamp.tune(model, **given, tolerance=0.5).certificate["measured"] <= 0.5


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 32), nn.Linear(32, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.layer(self.embed(x))) * 4).flatten(0, 1)


@pytest.mark.parametrize("rows", [16, 256, *matrix(2048)])
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_the_increase_of_the_loss_is_that_of_random_roundings_for_any_number_of_examples(kind: str, rows: int) -> None:
    torch.manual_seed(1)
    layers = nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
    model = nn.Sequential(*layers) if kind == "mlp" else Tokens()
    x = torch.randn(rows, 32) if kind == "mlp" else torch.randint(32, (rows // 8, 8))
    with torch.no_grad():
        for p in model.parameters() if kind == "mlp" else ():
            p.mul_(2)
        y = torch.distributions.Categorical(logits=model(x)).sample()
    policy, generator = "O2,dtype=bf16", torch.Generator().manual_seed(0)
    draws = [(x, y)] * (32 if rows == 16 else 3)  # of 16 examples one draw scatters as much as it gives
    predicted = fxamp.estimate_error(model, batches=draws, loss=CE, policies=policy).policies[0].increase
    step, slopes = step_of(model, x, y, loss=CE), dict[Any, Tensor]()

    def slope(site: Site, value: Tensor) -> Tensor:
        if site.rounds and site.part != "scores":
            value = value if value.requires_grad else value.detach().requires_grad_()
            value.register_hook(lambda grad: slopes.update({site.place: grad.detach()}))
        return value

    def moved(site: Site, value: Tensor) -> Tensor:
        if not site.rounds or site.part == "scores":
            return value
        made = stochastic(value.contiguous(), torch.bfloat16, generator)
        linear.append(float((slopes[site.place] * (made - value).detach()).double().sum()))
        return made

    loss, rises = step.run(step.batches[0], policy, Observer(slope)).loss, list[float]()
    for _ in range(32):  # of the second order: what is left without the first
        linear: list[float] = []
        rises.append(step.run(step.batches[0], policy, Observer(moved), backward=False).loss - loss - sum(linear))
    measured = sum(rises) / len(rises) / 2  # stochastic rounding has twice the variance
    assert predicted is not None
    assert measured / 2 < predicted < measured * 2
    assert fxamp.estimate_error(model, x, y, loss=CE, policies=policy, gradients=False).policies[0].increase is None


def test_nothing_that_requires_a_gradient_is_refused() -> None:
    model = nn.Linear(8, 1).requires_grad_(False)
    for diagnose in (fxamp.estimate_error, fxamp.tune):
        with pytest.raises(PolicyError, match="no parameter of Linear requires a gradient"):
            diagnose(model, torch.randn(4, 8), loss=torch.mean)


def test_what_is_not_captured_is_said() -> None:
    def left_alone(self: nn.Module, grad_input: Any, grad_output: Any) -> None:
        """Do nothing; Dynamo leaves the module to Python."""

    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    model[0].register_full_backward_hook(left_alone)
    with pytest.raises(CaptureError, match="nothing of it was captured"):
        fxamp.estimate_error(model, torch.randn(4, 8), loss=torch.mean, policies="O1")
    with pytest.raises(CaptureError, match="nothing of it was captured"):
        fxamp.calibrate(model, torch.randn(4, 8), loss=torch.mean)

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(self.outside(x))
            return out

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def outside(self, x: Tensor) -> Any:
            return self.a(x)

    found = fxamp.estimate_error(Partly(), torch.randn(4, 8), loss=torch.mean, policies="O1")
    assert "what reads a.bias, a.weight" in found.notes[-1]


class Broken(nn.Module):
    """Breaks its graph where a value is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x).transpose(-2, -1))
        torch._dynamo.graph_break()
        return self.last(h.transpose(-2, -1)) * 1


def test_gradients_are_estimated_across_a_break_at_a_transposed_value() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, 5, 8)
    report = fxamp.estimate_error(Broken(), x, y, loss=F.mse_loss, policies=("O1",), gradients="nodes")
    parts = report["O1"].by("module", "gradient")
    assert parts["first"] > 0
    assert parts["last"] > 0


def test_the_cast_of_an_input_is_named_as_the_call_names_it() -> None:
    x = torch.randn(4, 8)
    model = nn.Linear(8, 2)
    for inputs, name in ((x, "0"), ({"input": x}, "input")):
        found = fxamp.estimate_error(
            model, inputs, loss=lambda output: output.square().mean(), policies="O1,dtype=bf16"
        )
        assert f"cast of input {name}" in {node.what for node in found["O1,dtype=bf16"].nodes}


def test_that_fp16_does_not_hold_what_the_loss_depends_on_is_said() -> None:
    x, y = torch.randn(6, 8), torch.arange(6) % 4
    found = fxamp.estimate_error(NormByHand(), x, y, loss=F.cross_entropy, policies=("O1,dtype=fp16", "O1,dtype=bf16"))
    (note,) = (each for each in found.notes if "does not hold the values of" in each)
    assert note.startswith("O1,dtype=fp16: float16 does not hold the values of /pow#0")
    mask = nn.Sequential(nn.Linear(8, 4), nn.Threshold(0.0, -1e30), nn.Softmax(-1))  # beyond FP16, and its share is 0
    found = fxamp.estimate_error(mask, x, y, loss=F.nll_loss, policies="O3,dtype=fp16")
    assert not [each for each in found.notes if "does not hold" in each]
