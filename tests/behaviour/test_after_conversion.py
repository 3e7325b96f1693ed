"""What is done with a converted module and with its model: moved, loaded, compiled, differentiated by sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

import fxamp
from tests.support.front_ends import BF16, F32, FP16, FRESH, convert, each_front_end, one
from tests.support.helpers import Two, assert_same, assert_untouched, example, fingerprint

pytestmark = FRESH


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_the_model_stays_as_it_was_and_its_outputs_keep_their_dtype(front_end: str) -> None:
    model = Two(lambda self, x: {"y": self.m(self.l(x)), "half": self.l(x).half()})
    before = fingerprint(model)
    module = convert(model, one(), front_end, "O2")
    if front_end != "view":  # Dynamo leaves marks of its own on a module
        assert_untouched(model, before)
    got = module(*one())
    for (path, kind, _, values), (_, now, _, after) in zip(before[0], fingerprint(model)[0], strict=True):
        assert kind is now, path
        assert [(i, v) for i, v, *_ in values] == [(i, v) for i, v, *_ in after], path  # objects, and their versions
    assert (got["y"].dtype, got["half"].dtype) == (F32, FP16)


def test_an_input_of_another_dtype_makes_a_new_plan() -> None:
    model = Two(lambda self, x: self.m(self.l(x.to(self.l.weight.dtype)) + x))
    module = convert(model, None, "view")
    assert module(example()).dtype == F32
    low = module(example().to(BF16))
    assert low.dtype == F32
    torch.testing.assert_close(low, module(example()), rtol=0.05, atol=0.05)
    assert len(fxamp.graphs(module)) == 2


def test_the_graph_can_be_cached() -> None:
    from torch._functorch._aot_autograd.autograd_cache import check_cacheable

    given: list[Any] = []

    def keep(gm: Any, inputs: Any) -> Any:
        given.append(gm)
        return gm

    model = Two(lambda self, x: F.layer_norm(self.m(F.gelu(self.l(x))), (6,)))
    fxamp.compile(model, backend=keep)(*one())
    check_cacheable(given[0])


@pytest.mark.default_case(front_end="view")
@pytest.mark.parametrize("front_end", ["view", "graph"])
def test_a_compiled_converted_module_has_the_same_gradients(front_end: str) -> None:
    model = Two(lambda self, x: F.layer_norm(self.m(F.gelu(self.l(x))), (6,)).square())
    module = convert(model, one(), front_end)
    whole = front_end == "graph"  # an outer torch.compile breaks its graph at a view, which runs its own plan
    compiled = torch.compile(module, fullgraph=whole, backend="aot_eager")
    found = []
    for run in (module, compiled):
        model.zero_grad()
        output = run(*one())
        output.sum().backward()
        found.append((output, [p.grad for p in model.parameters()]))
    assert_same(found[0], found[1])


def test_per_sample_gradients_of_a_group_norm() -> None:
    torch.manual_seed(0)
    model = Two(lambda self, x: self.m(F.group_norm(self.l(x), 2)).square())
    module = convert(model, one())
    parameters = {n: p.detach() for n, p in module.named_parameters()}

    def loss(values: dict[str, Tensor], row: Tensor) -> Any:
        return functional_call(module, values, (row[None],)).sum()

    together = vmap(grad(loss), in_dims=(None, 0))(parameters, example())
    for i, row in enumerate(example()):
        for name, value in grad(loss)(parameters, row).items():
            assert (together[name][i] - value).norm() <= 2**-4 * value.norm(), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # of torch's own function
def test_a_cuda_graph_sees_new_weights() -> None:
    model = Two().cuda()
    x = example().cuda()
    module = convert(model, (x,), "graph")
    graphed: Any = torch.cuda.make_graphed_callables(module, (x,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = graphed(x).clone()
    graphed(x).sum().backward()
    optimizer.step()
    after = graphed(x).clone()
    assert not torch.equal(before, after)
    assert torch.equal(after, module(x))
