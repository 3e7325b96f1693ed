"""Loops that read more than a loss from a model: each output has the dtype of the guide's table, and gradients hold.

What the caller computes from outputs is FP32, as without autocast. At O1 parameters have the gradients that they get
when the model alone runs under `torch.autocast` and the caller casts its outputs to FP32; where the model reads such an
output itself, that cast would cut it off, and the plan names the code `output`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from fxamp.demo import LeNet5
from tests.support.baseline import UnderAutocast
from tests.support.front_ends import F32, FRESH, tensors

pytestmark = FRESH
BF16 = torch.bfloat16


class VAE(nn.Module):
    """An encoder with two heads, a sample by their numbers, and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.logvar = nn.Linear(16, 12), nn.Linear(12, 4), nn.Linear(12, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 16))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x).relu()
        mean, logvar = self.mean(h), self.logvar(h)
        return self.decoder(mean + noise * (0.5 * logvar).exp()), mean, logvar


def vae_loss(called: Any, x: Tensor, noise: Tensor) -> tuple[list[Tensor], Tensor]:
    outputs = called(x, noise)
    restored, mean, logvar = tensors(outputs)
    divergence = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(1).mean()
    return tensors(outputs), F.mse_loss(restored, x) + 1e-2 * divergence


class ActorCritic(nn.Module):
    """Logits of a policy and a value by one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = nn.Linear(16, 12), nn.Linear(12, 5), nn.Linear(12, 1)

    def forward(self, x: Tensor, _: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x).tanh()
        return {"logits": self.actor(h), "value": self.critic(h).squeeze(-1)}


def actor_critic_loss(called: Any, x: Tensor, noise: Tensor) -> tuple[list[Tensor], Tensor]:
    outputs = called(x, noise)
    logits, value = tensors(outputs)
    rewards = noise.sum(1)
    chosen = torch.distributions.Categorical(logits=logits)
    gain = chosen.log_prob(noise.argmax(1)) * (rewards - value.detach())
    return tensors(outputs), F.mse_loss(value, rewards) - gain.mean() - 0.01 * chosen.entropy().mean()


class DeeplySupervised(nn.Module):
    """Predictions at three depths, the last two of them computed from the features of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(16, 4) for _ in range(3)])

    def forward(self, x: Tensor, _: Tensor) -> list[Tensor]:
        outputs = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x).relu()
            outputs.append(head(x))
        return outputs


def deep_supervision_loss(called: Any, x: Tensor, noise: Tensor) -> tuple[list[Tensor], Tensor]:
    outputs = called(x, noise)
    losses = [w * F.cross_entropy(h, noise.argmax(1)) for w, h in zip((0.25, 0.5, 1), tensors(outputs), strict=True)]
    return tensors(outputs), sum(losses, torch.zeros(()))


class Generator(nn.Module):
    """A decoder whose last layer decides how an adversarial loss is weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(16, 12), nn.Linear(12, 16)
        self.judge = nn.Sequential(nn.Linear(16, 8), nn.LeakyReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        image = self.last(self.body(x).relu())
        return image, self.judge(image)


def adaptive_weight_loss(called: Any, x: Tensor, noise: Tensor) -> tuple[list[Tensor], Tensor]:
    """VQGAN's: the adversarial loss weighs as much as the other, by the gradients of the last layer's output."""
    outputs = called(x, noise)
    image, verdict = tensors(outputs)
    restored, adversarial = F.l1_loss(image, x), -verdict.mean()
    by_restored, by_adversarial = (torch.autograd.grad(s, image, retain_graph=True)[0] for s in (restored, adversarial))
    weight = (by_restored.norm() / (by_adversarial.norm() + 1e-4)).clamp(0, 1e4).detach()
    return tensors(outputs), restored + 0.8 * weight * adversarial


class Features(nn.Module):
    """The last maps of a convolutional network, beside its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 6, 3, padding=1), nn.Linear(6, 4)

    def forward(self, x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.conv(x.view(-1, 1, 4, 4)).relu()
        return maps, self.head(maps.mean((2, 3)))


def class_activation_loss(called: Any, x: Tensor, noise: Tensor) -> tuple[list[Tensor], Tensor]:
    """Grad-CAM's map, as a loss that holds it down: its weights are gradients by the maps."""
    outputs = called(x, noise)
    maps, logits = tensors(outputs)
    (by_maps,) = torch.autograd.grad(logits.max(1).values.sum(), maps, retain_graph=True)
    drawn = (by_maps.mean((2, 3), keepdim=True) * maps).sum(1).relu()
    return tensors(outputs), F.cross_entropy(logits, noise.argmax(1)) + 0.1 * drawn.mean()


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[list[Tensor], Tensor]]]] = {
    "VAE": (VAE, vae_loss),
    "actor-critic": (ActorCritic, actor_critic_loss),
    "deep supervision": (DeeplySupervised, deep_supervision_loss),
    "GAN with an adaptive weight": (Generator, adaptive_weight_loss),
    "Grad-CAM": (Features, class_activation_loss),
}


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, 16, generator=generator), torch.rand(64, 4, generator=generator)


class InFP32(nn.Module):
    """A model under `torch.autocast`, whose caller casts to FP32 what the model itself does not read."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.called = UnderAutocast(model, BF16)

    def forward(self, *args: Any) -> list[Tensor]:
        first, *others = tensors(self.called(*args))
        read = isinstance(self.called.model, Generator | Features)
        return [first if read else first.float(), *(h.float() for h in others)]


def gradients(model: nn.Module, called: Any, loss: Any, dtype: torch.dtype = F32) -> Tensor:
    """Return the gradients of all parameters on each of 16 batches."""
    rows = []
    for seed in range(16):
        model.zero_grad()
        _, total = loss(called, *(t.to(dtype) for t in data(seed)))
        total.backward()
        rows.append(torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]))
    return torch.stack(rows)


@pytest.mark.default_case(policy="O2,dtype=bf16")
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("policy", ["O0", "O1,dtype=bf16", "O2,dtype=bf16"])
def test_each_output_of_a_loop_has_the_models_own_dtype(name: str, policy: str) -> None:
    make, loss = LOOPS[name]
    torch.manual_seed(0)
    model = make()
    view = fxamp.convert(model, data(), policy=policy)
    for train in (True, False):
        outputs, total = loss(view.train(train), *data())
        assert {h.dtype for h in outputs} | {total.dtype} == {F32}
        with torch.no_grad():
            assert {h.dtype for h in tensors(view(*data()))} == {F32}
    low = fxamp.convert(model, data(), policy=f"{policy},output_dtype=autocast")
    expected = F32 if policy == "O0" else BF16
    assert {h.dtype for h in tensors(low(*data()))} == {expected}


@pytest.mark.parametrize("name", LOOPS)
def test_parameters_of_a_loop_have_autocasts_gradients_or_the_plan_names_the_output(name: str) -> None:
    make, loss = LOOPS[name]
    torch.manual_seed(0)
    model = make()
    view = fxamp.convert(model, data(), policy="O1,dtype=bf16")
    ours, theirs = gradients(model, view, loss), gradients(model, InFP32(model), loss)
    assert ours.any()
    if torch.equal(ours, theirs):
        return
    assert "output" in {d.code for d in fxamp.plan_of(view).deviations}
    exact = gradients(model.double(), model, loss, torch.float64)
    # Most of the error is that of the matmuls, which both have: one rounding less of a sum shows where it is large.
    assert (ours - exact).norm() < (theirs - exact).norm() * 1.005


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "mse_loss": lambda logits, y: F.mse_loss(logits, F.one_hot(y, 10).float()),
    "nll_loss of log_softmax": lambda logits, y: F.nll_loss(F.log_softmax(logits, -1), y),
    "kl_div of log_softmax": lambda logits, y: F.kl_div(F.log_softmax(logits, -1), F.one_hot(y, 10).float()),
    "softmax": lambda logits, y: (F.softmax(logits, -1) - F.one_hot(y, 10)).square().mean(),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss:UserWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_outside_of_a_view_is_autocasts_by_its_output_dtype_or_where_autocast_runs_it_in_fp32(name: str) -> None:
    model, x, y = LeNet5(), torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    alone = fxamp.convert(model, policy="O1,dtype=bf16")(x)
    logits = fxamp.convert(model, policy="O1,dtype=bf16,output_dtype=autocast")
    with torch.autocast("cpu", BF16):
        theirs, ours = (LOSSES[name](called(x), y) for called in (model, logits))
    assert torch.equal(ours, theirs)
    assert torch.equal(LOSSES[name](alone, y), theirs) == (name in ("cross_entropy", "mse_loss"))
