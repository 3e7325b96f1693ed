"""CUDA: dtypes are those of the real autocast kernels, for which no GPU is needed; CUDA graphs, for which one is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from passes.contract.reasons import DEVIATIONS
from passes.ops.rules import FOLLOW, LOW, lookup
from reports.zoo import BY_NAME
from tests.support.cuda_oracle import compare
from tests.support.processes import in_another_process

SECONDS = 600.0  # for all models of the zoo
SOME = ("lenet5", "graph_conv", "gpt")
# What fake CUDA tensors cannot run without a device (the latter in a build for CUDA), and what the rule table says.
UNRUN = {"batch_norm": FOLLOW, "lstm": LOW}


def _check(names: Sequence[str]) -> None:
    found = in_another_process(compare, list(names), seconds=SECONDS)
    assert [model["name"] for model in found] == list(names)
    for model in found:
        assert set(model["unrun"]) <= set(UNRUN), model["name"]
        assert len(model["rows"]) >= 8
        for row in model["rows"]:
            _, _, expected, autocast, got, code = row
            assert autocast == expected, (model["name"], row)
            # The cut stores a value in another dtype where no reader sees the difference.
            assert got == expected or code in ("cut", *DEVIATIONS), (model["name"], row)


def test_every_node_has_the_dtype_of_the_real_cuda_autocast_kernels() -> None:
    _check(SOME)


@pytest.mark.matrix
def test_every_node_of_the_other_models_has_the_dtype_of_the_real_cuda_autocast_kernels() -> None:
    _check([name for name in BY_NAME if name not in SOME])


@pytest.mark.parametrize("name", UNRUN)
def test_what_cannot_run_here_is_in_the_rule_table(name: str) -> None:
    assert lookup(name, "cuda")[1] == UNRUN[name]


# Where torch itself is wrong: CUDA graphs under autocast. A view has no autocast region that a graph could record.

LOW = "O1,dtype=bf16,output_dtype=autocast"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")


class Convolutions(nn.Module):
    """The model of pytorch#71631, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x)
        return x


@needs_cuda
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # of torch's own function
def test_pytorch_71631_a_model_trains_in_cuda_graphs_as_without() -> None:
    """Captured under autocast, a graph may read casts of weights that were cached before an optimizer step."""
    torch.manual_seed(0)
    model, x = Convolutions().cuda(), torch.randn(4, 16, 8, 8, device="cuda")
    twin = copy.deepcopy(model)
    graphed: Any = torch.cuda.make_graphed_callables(fxamp.convert(model, (x,), policy=LOW), (x,))
    plain = fxamp.convert(twin, (x,), policy=LOW)
    for called, parameters in ((graphed, model.parameters()), (plain, twin.parameters())):
        optimizer = torch.optim.SGD(parameters, 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            called(x).float().square().mean().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.equal(graphed(x), plain(x))


class Scaled(nn.Module):
    """The model of pytorch#120930."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a * 10, b * 10)


@needs_cuda
def test_pytorch_120930_the_backward_of_a_cuda_graph_is_not_under_autocast() -> None:
    """Captured under autocast, a graph records its backward under autocast too."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, n, 96, device="cuda", requires_grad=True) for n in (64, 96)]
    others = [t.detach().clone().requires_grad_() for t in inputs]
    sample = tuple(t.detach().clone().requires_grad_() for t in inputs)
    graphed: Any = torch.cuda.make_graphed_callables(fxamp.convert(Scaled(), sample, policy=LOW), sample)
    got = graphed(*inputs)
    with torch.autocast("cuda", torch.bfloat16):
        expected = Scaled()(*others)
    assert torch.equal(got, expected)
    got.float().square().mean().backward()
    expected.float().square().mean().backward()  # outside of autocast, as torch's documentation says
    for a, b in zip(inputs, others, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)
