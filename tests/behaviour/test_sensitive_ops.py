"""Ops without a low kernel, or that lose too much in one, or that take one dtype only."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from passes.contract.errors import CaptureError
from tests.support.front_ends import F32, FRESH, at_levels, decided, each_front_end, error, one
from tests.support.helpers import Two, example

pytestmark = FRESH


def test_the_operands_of_a_scatter_get_one_dtype() -> None:  # in a graph: torch.autocast itself fails on these
    index = torch.tensor([0, 2])
    everywhere = torch.zeros(4, 6, dtype=torch.long)

    def mixed(self: Any, x: Tensor) -> dict[str, Tensor]:
        y, wide = self.l(x), F.layer_norm(x, (6,), self.m.weight[0])
        mask = x > 0
        item, masked = wide.clone(), wide.clone()
        item[index] = y[:2]
        masked[mask] = y[mask]
        twice = wide
        for _ in range(2):
            twice = torch.zeros_like(twice).scatter_add(0, everywhere, self.m(twice))
        return {
            "scatter_add": twice,
            "scatter": wide.scatter(0, everywhere, y),
            "scatter_reduce": wide.scatter_reduce(0, everywhere, y, "sum"),
            "index_add": wide.index_add(0, index, y[:2]),
            "index_copy": wide.index_copy(0, index, y[:2]),
            "index_put": wide.index_put((index,), y[:2]),
            "masked_scatter": wide.masked_scatter(mask, y),
            "lerp": wide.lerp(y, torch.full((4, 6), 0.5)),
            "setitem": item,
            "setitem by mask": masked,
            "prelu": F.prelu(y, self.m.bias[:1]),
            "addmm": torch.addmm(wide, y, self.m.weight),
            "dot": torch.dot(y[0], wide[0]),
        }

    torch.manual_seed(0)  # a dot product of values that cancel has any error
    model = Two(mixed)
    for made in at_levels(model, one(), "graph", "O1,dtype=bf16", "O1,dtype=fp16"):
        module = made()
        got = module(*one())
        assert all(t.dtype == F32 for t in got.values())
        for name, exact in model(*one()).items():
            assert error(got[name], exact) < 0.03, name
        model.zero_grad()
        sum(t.sum() for t in got.values()).backward()
        for op in ("scatter_reduce", "index_add", "index_put", "masked_scatter", "lerp"):
            assert decided(module, op)[-1] == "float32", op
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_a_bilinear_layer_trains_behind_a_product(front_end: str) -> None:  # torch.autocast itself fails on these
    torch.manual_seed(0)
    model = Two(lambda self, x: self.b(self.l(x), x), b=nn.Bilinear(6, 6, 4))
    weights = [p for name, p in model.named_parameters() if name.startswith("b.")]
    exact = torch.autograd.grad(model(*one()).sum(), weights)
    if front_end == "view":  # which is traced under autocast
        with pytest.raises(CaptureError, match="All tensors must have the same dtype"):
            fxamp.convert(model, one(), policy="O1,dtype=bf16")
        return
    (make,) = at_levels(model, one(), front_end, "O1,dtype=bf16")
    got = torch.autograd.grad(make()(*one()).sum(), weights)
    assert all(0 < error(a, b) < 0.02 or torch.equal(a, b) for a, b in zip(got, exact, strict=True))


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_transforms_and_linear_algebra_run_in_the_precision_they_had(front_end: str) -> None:
    def spectral(self: Any, x: Tensor) -> dict[str, Tensor]:
        y = self.wide(x)
        filtered = torch.fft.irfft(torch.fft.rfft(y) * torch.polar(torch.ones(7), torch.arange(7.0)), n=12)
        square = y[:, :4] @ y[:, :4].mT + 4 * torch.eye(4)
        return {
            "filtered": self.back(filtered),
            "solved": torch.linalg.solve(square, y[:, :1]),
            "determinant": torch.linalg.det(square)[None],
            "inverse": torch.linalg.inv(square),
            "distance": torch.cdist(y, y * 2),
            **({"quantile": torch.quantile(y, 0.5)[None]} if quantile else {}),
        }

    quantile = torch.__version__ >= "2.13"  # the exporter could not take it before

    torch.manual_seed(0)
    model = Two(spectral, wide=nn.Linear(6, 12), back=nn.Linear(12, 6))
    for made in at_levels(model, one(), front_end, "O1", "O2", "O3"):
        module = made()
        got = module(*one())
        for name, expected in model(*one()).items():
            assert got[name].dtype == F32, name
            assert error(got[name], expected) < 0.05, name
        assert decided(module, "linalg_solve") == decided(module, "linalg_inv") == ["float32"]
        assert decided(module, "linear") == ["bfloat16", "bfloat16"]


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_a_grid_is_sampled_at_fp32_coordinates(front_end: str) -> None:
    def transform(self: Any, image: Tensor) -> Tensor:
        theta = torch.eye(2, 3)[None] + 0 * self.l(image[0, 0, :1, :6]).mean()
        grid = F.affine_grid(theta, [1, 1, 256, 256], align_corners=False)
        return F.grid_sample(image, grid, align_corners=False)

    image = torch.linspace(0, 1, 256).expand(1, 1, 256, 256).contiguous()
    model = Two(transform)
    for made in at_levels(model, (image,), front_end, "O1", "O2"):
        module = made()
        assert (module(image) - model(image)).abs().max() < 1e-2
        assert decided(module, "grid_sampler") == ["float32"]


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_a_binary_cross_entropy_of_probabilities_runs_in_fp32(front_end: str) -> None:
    model = Two(lambda self, x, y: F.binary_cross_entropy(torch.sigmoid(self.l(x) * 40), y))
    args = (example(), torch.ones(4, 6))
    for made in at_levels(model, args, front_end, "O1", "O2"):
        module = made()
        torch.testing.assert_close(module(*args), model(*args), rtol=0.02, atol=0.0)
        assert decided(module, "binary_cross_entropy") == ["float32"]


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_the_loss_over_many_classes_at_o2_is_as_exact_as_under_autocast(kind: str) -> None:
    def loss(self: Any, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(torch.tanh(self.l(x))), target)

    torch.manual_seed(0)
    classes, low = 2000, {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    model = Two(loss, logits=nn.Linear(6, classes))
    exact = copy.deepcopy(model).double()
    batches = [(torch.randn(64, 6), torch.randint(classes, (64,))) for _ in range(20)]
    module = fxamp.convert(model, batches[0], policy=f"O2,dtype={kind}")
    ours = theirs = 0.0
    with torch.no_grad():
        for x, target in batches:
            true = exact(x.double(), target)
            with torch.autocast("cpu", low):
                theirs += float((model(x, target).double() - true) ** 2)
            ours += float((module(x, target).double() - true) ** 2)
    assert ours <= 1.5**2 * theirs
