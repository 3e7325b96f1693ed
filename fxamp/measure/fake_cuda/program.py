"""What stands for the code that Inductor generates for a graph: it is counted when it runs, and gives fake tensors."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor import config, ir
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from ..inductor import recorded, recorded_since, recording
from .tally import FakeGpu


@contextlib.contextmanager
def scheduled_alone(gpu: FakeGpu) -> Iterator[None]:
    """Inside, Inductor schedules and generates code, and what it then would compile and run is counted instead."""

    def compile_to_module(graph: Any) -> Any:
        mark = recorded()
        graph.codegen()
        (made,) = recorded_since(mark)
        graph.cache_key, graph.cache_path, graph.cache_linemap = "", "", []
        names, results = tuple(graph.graph_input_names), _results(graph)

        def call(args: list[Any]) -> list[Any]:
            inputs = dict(zip(names, args, strict=True))
            outputs: list[Any] = gpu.run(made, lambda: results(args, inputs))
            return outputs

        return types.SimpleNamespace(call=call, __file__="")

    # Caches would keep code that does nothing. Padding of products is chosen by timing them.
    patches = {"force_disable_caches": True, "compile_threads": 1, "shape_padding": False, **recording()}
    with config.patch(patches), mock.patch.object(GraphLowering, "_compile_to_module", compile_to_module):
        yield


def _results(graph: Any) -> Callable[[list[Any], dict[str, Any]], list[Any]]:
    """Return what makes the outputs of a graph from its inputs, by name: outputs that share memory do so here."""
    made = [_geometry(value) for value in graph.graph_outputs]
    handed_on = {each[0] for each in made if isinstance(each, tuple)}

    def results(args: list[Any], inputs: dict[str, Any]) -> list[Any]:
        buffers = {name: value for name, value in inputs.items() if name in handed_on}
        args.clear()  # by now the graph has freed them
        inputs.clear()
        return [each if not isinstance(each, tuple) else _tensor(buffers, *each) for each in made]

    return results


def _geometry(value: Any) -> Any:
    """Return the name, sizes, strides, offset, dtype and device of an output; a number or None as it is."""
    if isinstance(value, ir.ShapeAsConstantBuffer):
        return _number(value.expr)
    if not isinstance(value, ir.IRNode) or isinstance(value, ir.NoneAsConstantBuffer):
        return None
    layout: Any = value.get_layout()
    sizes, strides = (tuple(map(_number, of)) for of in (layout.size, layout.stride))
    return value.get_name(), sizes, strides, _number(layout.offset), layout.dtype, layout.device


def _number(expression: Any) -> int:
    sizes: Any = V.graph.sizevars
    return int(sizes.optimization_hint(expression, fallback=1))


def _tensor(
    buffers: dict[str, Tensor], name: str, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int,
    dtype: torch.dtype, device: torch.device,
) -> Tensor:  # fmt: skip
    buffer = buffers.get(name)
    if buffer is None or buffer.dtype != dtype:
        buffer = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
        return buffers.setdefault(name, buffer)
    if (tuple(buffer.shape), buffer.stride(), buffer.storage_offset()) == (sizes, strides, offset):
        return buffer
    return buffer.detach().as_strided(sizes, strides, offset)
