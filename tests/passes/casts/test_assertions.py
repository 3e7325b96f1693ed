"""Assertions of the exporter hold of what runs, on any device and in the dtype that a value has now."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

from passes.casts.insert_casts import loosen_assertions
from tests.support.graphs import Builder, aten

BF16 = torch.bfloat16


def assertion(dtype: torch.dtype) -> GraphModule:
    builder = Builder()
    x = builder.input("x", (2,), dtype)
    builder.graph.call_function(
        aten._assert_tensor_metadata.default, (x, [2], None, torch.float32), {"device": torch.device("cpu")}
    )
    return builder.finish(x)


def test_an_assertion_loses_its_device_and_the_dtype_of_what_was_recoloured() -> None:
    gm = assertion(BF16)
    assert loosen_assertions(gm.graph, lambda n: True) == 1
    assert loosen_assertions(gm.graph, lambda n: True) == 0
    gm.recompile()
    gm(torch.ones(2, dtype=BF16))
    with pytest.raises(RuntimeError, match="sizes mismatch"):
        gm(torch.ones(3, dtype=BF16))


def test_an_assertion_on_what_was_not_recoloured_still_holds() -> None:
    gm = assertion(torch.float32)
    assert loosen_assertions(gm.graph, lambda n: False) == 1
    assert loosen_assertions(gm.graph, lambda n: False) == 0
    gm.recompile()
    gm(torch.ones(2))
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        gm(torch.ones(2, dtype=BF16))
