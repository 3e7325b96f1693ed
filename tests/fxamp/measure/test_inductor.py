"""What Inductor made of a graph: its own metrics say the same, and so does what a run allocates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

from fxamp._torch import kept_by_compiled
from fxamp.measure.inductor import Counts, Graph, recorded, recorded_since, recording
from reports.peak import peak_of
from tests.support.front_ends import FRESH

pytestmark = [
    pytest.mark.slow,
    *FRESH,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:dynamo_pgo force:UserWarning"),
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output: Tensor = model(x)
        return output.float().square().mean()


def compiled(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, list[Graph]]:
    """Compile a function, run it forward and backward, and return its result and what was recorded."""
    torch.compiler.reset()
    mark = recorded()
    found = torch.compile(function, options={**recording(), **options})(*args)
    if found.requires_grad:
        found.backward()
    return found, recorded_since(mark)


def test_counts_are_what_inductor_counts_itself() -> None:
    from torch._inductor import compile_fx, config, metrics

    metrics.reset()
    with (
        config.patch(force_disable_caches=True),
        mock.patch.object(compile_fx.inductor_metrics_log, "isEnabledFor", return_value=True),
    ):
        _, graphs = compiled(loss_of, net(), torch.randn(16, 32))
    total = sum((graph.counts for graph in graphs), Counts())
    assert [graph.kind for graph in graphs] == ["forward", "backward"]
    assert total.moved_bytes == metrics.num_bytes_accessed > 0
    assert total.kernels == sum(elements > 0 for _, elements in metrics.nodes_num_elem) > 8


def test_what_is_only_overwritten_is_not_read() -> None:
    def update(*tensors: Tensor) -> Tensor:
        weights, low = tensors[:2], tensors[2:]
        torch._foreach_mul_(weights, 2.0)
        for weight, copy in zip(weights, low, strict=True):
            copy.copy_(weight)
        return low[0].add_(1)  # this one reads what it writes

    size = 1000
    weights = [torch.ones(size) for _ in range(2)]
    _, graphs = compiled(update, *weights, *(torch.ones(size, dtype=torch.bfloat16) for _ in weights))
    total = sum((graph.counts for graph in graphs), Counts())
    assert total.moved_bytes == 2 * size * (4 + 4) + 2 * size * 2, "weights read and written, copies written"


def test_counts_are_known_of_what_comes_out_of_a_cache() -> None:
    from torch._dynamo.utils import counters

    _, first = compiled(loss_of, net(), torch.randn(16, 32))
    hits = counters["inductor"]["fxgraph_cache_hit"]
    _, second = compiled(loss_of, net(), torch.randn(16, 32))
    assert counters["inductor"]["fxgraph_cache_hit"] >= hits + 2
    assert second == first != []


def test_saved_bytes_are_those_of_the_tensors_that_autograd_keeps() -> None:
    model, x = net(), torch.randn(16, 32)
    mark = recorded()
    loss = torch.compile(loss_of, options=recording())(model, x)
    kept = kept_by_compiled([loss])
    assert kept is not None
    before = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), x)}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    loss.backward()
    saved = sum(graph.counts.saved_bytes for graph in recorded_since(mark))
    assert saved == sum(size for address, size in storages.items() if address not in before) > 0


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # on torch 2.11
def test_the_peak_is_that_of_a_run() -> None:
    model, x = net(), torch.randn(256, 32)
    mark = recorded()
    function = torch.compile(loss_of, options=recording())

    def run() -> None:
        function(model, x).backward()
        model.zero_grad(set_to_none=True)

    run()
    peak = sum((graph.counts for graph in recorded_since(mark)), Counts()).peak
    assert peak == pytest.approx(peak_of(run), rel=0.01)


@pytest.mark.parametrize(
    ("function", "casts"),
    [
        (lambda x: x.bfloat16(), 1),
        (lambda x: x.t().bfloat16(), 1),
        (lambda x: x.bfloat16() + 1, 0),
        (lambda x: x.t().clone(memory_format=torch.contiguous_format), 0),
    ],
)
def test_a_kernel_that_only_casts_is_counted_apart(function: Any, casts: int) -> None:
    _, (graph,) = compiled(function, torch.randn(16, 32))
    assert (graph.kind, graph.counts.kernels, graph.counts.cast_kernels) == ("inference", 1, casts)


def upcast_first_product(graph: fx.Graph) -> None:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    product = next(node for node in graph.nodes if node.target in products)
    with graph.inserting_before(product):
        product.args = tuple(_cast(graph, operand, torch.float32) for operand in product.args)
    product.meta["val"] = product.meta["val"].to(torch.float32)
    with graph.inserting_after(product):
        low = _cast(graph, product, torch.bfloat16)
    product.replace_all_uses_with(low, delete_user_cb=lambda user: user is not low)


def _cast(graph: fx.Graph, value: Any, dtype: torch.dtype) -> fx.Node:
    made = graph.call_function(torch.ops.prims.convert_element_type.default, (value, dtype))
    made.meta["val"] = value.meta["val"].to(dtype)
    return made


def test_a_pass_that_upcasts_a_product_shows() -> None:
    _, (before, _) = compiled(loss_of, net(), torch.randn(16, 32))
    _, (after, _) = compiled(loss_of, net(), torch.randn(16, 32), post_grad_custom_pre_pass=upcast_first_product)
    assert after.counts.moved_bytes > before.counts.moved_bytes
