"""What no 16-bit value has touched is not rounded beyond autocast: positions, times, statistics, masks.

They come as buffers or inputs. O2 is as exact as autocast on them, also on batches that were not there when the model
was converted. Doors and low dtypes take turns; all of them are tried by `python -m pytest -m matrix`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from tests.support.doors import DOORS
from tests.support.front_ends import FRESH
from tests.support.helpers import Layers, in_turns

pytestmark = FRESH
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOWEST = torch.finfo(torch.float32).min
Batch: TypeAlias = Callable[[int], tuple[Tensor, ...]]
Forward: TypeAlias = Callable[..., Tensor]


def built(forward: Forward, **buffers: Tensor) -> nn.Module:
    """Return a model of three layers and some buffers."""
    layers = {name: nn.Linear(32, 32) for name in "qkv"}
    return Layers(forward, **layers, **buffers)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def frequencies(count: int) -> Tensor:
    return 1.0 / 10000 ** (torch.arange(count) / count)


def attention(m: Any, x: Tensor, bias: Tensor) -> Tensor:
    scores = m.q(x) @ m.k(x).transpose(-1, -2) / math.sqrt(32) + bias
    return scores.softmax(-1) @ m.v(x)


# Positions.


def half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def rotary_halves(m: Any, x: Tensor, position: Tensor) -> Tensor:
    angles = torch.cat([position[..., None] * m.inv] * 2, -1)
    q, k = (p * angles.cos() + half(p) * angles.sin() for p in (m.q(x), m.k(x)))
    return q @ k.transpose(-1, -2) @ m.v(x)


def rotary_pairs(m: Any, x: Tensor) -> Tensor:
    angles = m.positions[: x.shape[1], None] * m.inv
    q = m.q(x)
    even, odd = q[..., ::2], q[..., 1::2]
    return torch.stack(
        [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1
    ).flatten(-2)


def rotary_tables(m: Any, x: Tensor) -> Tensor:
    q = m.q(x)
    return q * m.cos[: x.shape[1]] + half(q) * m.sin[: x.shape[1]]


def alibi(m: Any, x: Tensor) -> Tensor:
    return attention(m, x, -0.25 * (m.positions[None, :] - m.positions[:, None]).abs())


def relative_bias(m: Any, x: Tensor, position: Tensor) -> Tensor:
    distance = position[:, None, :] - position[:, :, None]
    return attention(m, x, m.table[distance.clamp(-8, 8).long() + 8])


def learned_scale_of_distance(m: Any, x: Tensor, place: Tensor) -> Tensor:
    distance = (place[:, :, None] - place[:, None, :]).pow(2)
    return attention(m, x, -distance)


# Times.


def sinusoidal_time(m: Any, t: Tensor) -> Tensor:
    angles = 1000 * t[:, None] * m.inv
    return m.v(F.silu(m.q(torch.cat([angles.sin(), angles.cos()], -1))))


def seconds(m: Any, x: Tensor, stamp: Tensor) -> Tensor:
    day = (stamp - m.start) * (2 * math.pi / 86400)
    return m.v(m.q(x) + torch.stack([day.sin(), day.cos()] * 16, -1))


def gaps(m: Any, x: Tensor, stamp: Tensor) -> Tensor:
    gap = stamp[:, 1:] - stamp[:, :-1]
    decay = torch.exp(-F.pad(gap, (1, 0)) / 60)
    return m.v(m.q(x) * decay[..., None])


def euler_steps(m: Any, h: Tensor, times: Tensor) -> Tensor:
    for i in range(8):
        h = h + (times[i + 1] - times[i]) * torch.tanh(m.q(h))
    return m.v(h)


def fourier_features(m: Any, x: Tensor) -> Tensor:
    angles = 2 * math.pi * x @ m.directions
    return m.v(torch.cat([angles.sin(), angles.cos()], -1))


def log_frequency(m: Any, x: Tensor, hertz: Tensor) -> Tensor:
    mel = 2595 * torch.log10(1 + hertz / 700)
    return m.v(m.q(x) * torch.sin(mel[..., None] * m.inv))


# Statistics.


def standardised(m: Any, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return m.v(torch.relu(m.q((x - mean) / (std + 1e-5))))


def instance_scaled(m: Any, x: Tensor) -> Tensor:
    mean, scale = x.mean(1, keepdim=True), x.std(1, keepdim=True)
    return m.v(torch.relu(m.q((x - mean) / (scale + 1e-5)))) * scale + mean


def running(m: Any, x: Tensor) -> Tensor:
    return m.v(torch.relu(m.q((x - m.mean) * torch.rsqrt(m.var + 1e-5))))


def counts(m: Any, x: Tensor, count: Tensor) -> Tensor:
    return m.v(m.q(x) * torch.log1p(count)[..., None] / 10 + count[..., None] / count.sum(-1)[..., None, None])


def weighted_mean(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return m.v((m.q(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1e-9))


def normed(m: Any, x: Tensor) -> Tensor:
    return m.v(F.batch_norm(x, m.mean, m.var)) + m.q(F.layer_norm(x, x.shape[-1:]))


# Masks.


def added(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return attention(m, x, mask)


def causal(m: Any, x: Tensor) -> Tensor:
    return attention(m, x, m.mask[: x.shape[1], : x.shape[1]])


def padding(m: Any, x: Tensor, present: Tensor) -> Tensor:
    return attention(m, x, ((1 - present) * -1e9)[:, None, :])


def fused(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return m.q(F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x), attn_mask=mask + m.bias))


def upper(value: float, size: int = 16) -> Tensor:
    return torch.full((size, size), value).triu(1)


def words(*more: Callable[[int], Tensor]) -> Batch:
    return lambda seed: (draw(seed, 2, 16, 32), *(make(seed) for make in more))


def positions(seed: int) -> Tensor:
    return torch.arange(16).float().expand(2, 16) + 500 * (seed + 1)


def stamps(seed: int) -> Tensor:
    return 1.7e9 + 86400 * seed + 3600 * torch.arange(16).float().expand(2, 16)


def masks(lowest: float) -> Callable[[int], Tensor]:
    """Return what makes a mask that hides all but some keys, from the second batch on."""
    return lambda seed: torch.where(torch.arange(16) < 16 - 5 * seed, 0.0, lowest).expand(2, 16, 16)


def one_row(seed: int, lowest: float = LOWEST) -> Tensor:
    """Return a mask that hides all keys of one row."""
    mask = torch.zeros(2, 16, 16)
    mask[0, 3 + seed] = lowest
    return mask


def present(seed: int) -> Tensor:
    return (torch.arange(16) < 16 - 5 * seed).float().expand(2, 16)


TABLE: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "rotary, halves, position ids": (lambda: built(rotary_halves, inv=frequencies(16)), words(positions)),
    "rotary, pairs, a buffer": (
        lambda: built(rotary_pairs, inv=frequencies(16), positions=torch.arange(2048.0) + 1000), words(),
    ),
    "rotary, tables in buffers": (
        lambda: built(rotary_tables, **{
            name: getattr(torch.cat([torch.arange(64.0)[:, None] * frequencies(16)] * 2, -1), name)()
            for name in ("cos", "sin")
        }),
        words(),
    ),
    "ALiBi": (lambda: built(alibi, positions=torch.arange(16.0) + 4000), words()),
    "relative position bias": (lambda: built(relative_bias, table=draw(9, 17)), words(positions)),
    "distances of places": (
        lambda: built(learned_scale_of_distance), words(lambda seed: 100 + draw(seed, 2, 16).sigmoid() + seed),
    ),
    "sinusoidal time": (lambda: built(sinusoidal_time, inv=frequencies(16)), lambda seed: (draw(seed, 32).sigmoid(),)),
    "timestamps in seconds": (lambda: built(seconds, start=torch.tensor(1.7e9)), words(stamps)),
    "gaps between timestamps": (lambda: built(gaps), words(stamps)),
    "Fourier features": (
        lambda: built(fourier_features, directions=10 * draw(9, 3, 16)), lambda seed: (draw(seed, 64, 3),),
    ),
    "log-frequency": (
        lambda: built(log_frequency, inv=frequencies(32)),
        words(lambda seed: torch.linspace(50, 8000 - 99 * seed, 16).expand(2, 16)),
    ),
    "statistics as inputs": (
        lambda: built(standardised),
        lambda seed: (1e5 + 1e3 * draw(seed, 16, 32), torch.full((32,), 1e5), torch.full((32,), 1e3)),
    ),
    "statistics of the instance": (lambda: built(instance_scaled), lambda seed: (1e4 + 100 * draw(seed, 2, 16, 32),)),
    "running statistics": (
        lambda: built(running, mean=torch.full((32,), 3e4), var=torch.full((32,), 1e4)),
        lambda seed: (3e4 + 100 * draw(seed, 16, 32),),
    ),
    "norms of an input": (
        lambda: built(normed, mean=torch.full((32,), 1e5), var=torch.full((32,), 1e6)),
        lambda seed: (1e5 + 1e3 * draw(seed, 256, 32),),
    ),
    "counts": (lambda: built(counts), words(lambda seed: torch.arange(1.0, 17).expand(2, 16) * (1000 + seed))),
    "mean over what is present": (lambda: built(weighted_mean), words(present)),
    "additive mask, finfo.min": (lambda: built(added), words(masks(LOWEST))),
    "additive mask, -1e9": (lambda: built(added), words(masks(-1e9))),
    "additive mask, -inf": (lambda: built(added), words(masks(-math.inf))),
    "additive mask of a whole row": (lambda: built(added), words(one_row)),
    "causal mask, a buffer with finfo.min": (lambda: built(causal, mask=upper(LOWEST)), words()),
    "causal mask, a buffer with -inf": (lambda: built(causal, mask=upper(-math.inf)), words()),
    "padding mask, times -1e9": (lambda: built(padding), words(present)),
    "fused attention, mask and bias": (lambda: built(fused, bias=draw(9, 16, 16)), words(masks(LOWEST))),
}  # fmt: skip


def turns() -> list[Any]:
    """Return every model by every door in both dtypes; the matrix has all but one of every other model."""
    every = [(door, low) for low in DTYPES for door in DOORS]
    return [
        pytest.param(name, *way, marks=() if (at % 2, way) == (0, every[at // 2 % len(every)]) else pytest.mark.matrix)
        for at, name in enumerate(TABLE)
        for way in every
    ]


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.float() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("model_name", "door", "number"), turns())
def test_o2_is_as_exact_as_autocast_on_raw_inputs_and_buffers(model_name: str, door: str, number: str) -> None:
    make, batch = TABLE[model_name]
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        run = DOORS[door](model, batch(0), f"O2,dtype={number}")
        for seed in range(3):  # the second and third batch are unseen
            exact = model(*batch(seed))
            with torch.autocast("cpu", DTYPES[number]):
                allowed = error(model(*batch(seed)), exact)
            assert math.isfinite(found := error(run(*batch(seed)), exact)), found
            assert found <= 1.5 * allowed or not math.isfinite(allowed), (found, allowed)


def test_a_solver_whose_state_o2_sums_in_16_bits_is_as_exact_as_autocast_with_its_sums_in_fp32() -> None:
    """From O2 on a residual stream is low, and small updates of it are rounded: 1.7 times autocast's error here."""
    torch.manual_seed(0)
    model, (h, times) = built(euler_steps), (draw(0, 16, 32), torch.linspace(0, 1, 9))
    with torch.no_grad():
        exact = model(h, times)
        with torch.autocast("cpu", torch.bfloat16):
            allowed = 1.5 * error(model(h, times), exact)
        plain, summed = (
            error(fxamp.compile(model, policy=f"O2,dtype=bf16{sums}", backend="eager")(h, times), exact)
            for sums in ("", ",ops.add=fp32")
        )
    assert summed <= allowed < plain


def test_a_mask_that_turns_extreme_after_conversion_keeps_the_values_finite() -> None:
    torch.manual_seed(0)
    model, x = built(added), draw(1, 2, 16, 32)
    with torch.no_grad():
        for low in ("bf16", "fp16"):
            run = fxamp.convert(model, (x, torch.zeros(2, 16, 16)), policy=f"O2,dtype={low}")
            rounded = {d.colour for d in fxamp.plan_of(run).decisions if d.op == "softmax"}
            assert rounded <= {"bfloat16", "float16"}
            for lowest in (-1e4, -1e9, LOWEST, -math.inf):
                got, exact = (call(x, one_row(1, lowest)) for call in (run, model))
                assert error(got[1], exact[1]) < 0.01
                assert got.isfinite().all() or not math.isfinite(lowest)


def _written(write: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor], Tensor]:
    def mask_of(mask: Tensor) -> Tensor:
        made = (mask * 0).sigmoid().clone()  # bounded by what makes it, until it is written
        write(made, mask)
        return made

    return mask_of


MADE_OF_A_MASK: dict[str, Callable[[Tensor], Tensor]] = {
    "where": lambda mask: torch.where(mask.new_ones(()).bool(), mask, torch.zeros_like(mask)),
    "minimum": lambda mask: torch.minimum(torch.zeros_like(mask), mask),
    "cat": lambda mask: torch.cat([torch.zeros_like(mask[..., :4]), mask[..., 4:]], -1),
    "add_": _written(lambda made, mask: made.add_(mask)),
    "copy_": _written(lambda made, mask: made.copy_(mask)),
    "an item of a view": _written(lambda made, mask: made[0].__setitem__(slice(None), mask[0])),
}


@pytest.mark.parametrize(("way", "low"), in_turns(MADE_OF_A_MASK, ["bf16", "fp16"]))
def test_a_mask_made_of_one_that_turns_extreme_keeps_the_values_finite(way: str, low: str) -> None:
    torch.manual_seed(0)
    model, x = built(lambda m, x, mask: attention(m, x, MADE_OF_A_MASK[way](mask))), draw(1, 2, 16, 32)
    with torch.no_grad():
        run = fxamp.convert(model, (x, torch.zeros(2, 16, 16)), policy=f"O2,dtype={low}")
        got, exact = (call(x, one_row(1)) for call in (run, model))
    assert got.isfinite().all()
    assert error(got, exact) < 0.01


def test_what_o2_casts_down_and_autocast_does_not_is_brought_into_range_once() -> None:
    model, args = built(added), (draw(0, 2, 16, 32), one_row(0))
    rounded, exact = (fxamp.graphs(fxamp.convert(model, args, policy=p))[0] for p in ("O2,dtype=bf16", "O1"))
    clamps = [n for n in rounded.graph.nodes if n.target is torch.ops.aten.clamp.default]
    assert [n.args[0].op for n in clamps] == ["placeholder"]  # the mask
    assert not [n for n in exact.graph.nodes if n.target is torch.ops.aten.clamp.default]


def test_what_autocast_casts_down_after_a_move_is_not_brought_into_range() -> None:
    def moved(self: Any, x: Tensor) -> Tensor:
        return torch.matmul(x.reshape(-1, 1), self.one).reshape(x.shape).softmax(-1)

    x = torch.randn(2, 3)
    view = fxamp.convert(Layers(moved, one=nn.Parameter(torch.ones(1, 1))), (x,), policy="O2,dtype=bf16")
    moves = [d.colour for d in fxamp.plan_of(view).decisions if d.op == "reshape"]
    assert moves[0] == "bfloat16"  # the input is cast before it is moved
    assert not [n for n in fxamp.graphs(view)[0].graph.nodes if n.target is torch.ops.aten.clamp.default]
    x[0, 0] = -math.inf
    assert view(x)[0, 0] == 0
    assert view(torch.full((2, 3), -math.inf)).isnan().all()  # as in FP32, and under autocast
