"""What an ExportedProgram is under autocast is read off its own graph: it is exported once more, not twice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fxamp
from tests.support.helpers import Two, example

export = torch.export.export


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collect what is exported."""
    found: list[Any] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(args[0])
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    return iter([found])


def writes(self: Two, x: Tensor) -> Any:
    h = self.l(x)
    h[:, 0] = 0.5
    with torch.no_grad():
        scale = h.square().mean(-1, keepdim=True)
    return self.m(h * scale).softmax(-1)


def casts(self: Two, x: Tensor) -> Any:
    return (self.l(x).float() * 2).softmax(-1)


def branch(self: Two, x: Tensor) -> Any:
    h = self.l(x)
    return torch.cond(h.sum() > 0, lambda h: h.sin(), lambda h: h.cos(), (h,)).softmax(-1)


@pytest.mark.parametrize(("forward", "times"), [(writes, 1), (casts, 1), (branch, 2)])
def test_a_program_is_exported_anew_once_but_for_one_with_other_graphs_in_it(
    forward: Callable[..., Any], times: int, exports: Iterator[list[Any]]
) -> None:
    torch.manual_seed(0)
    model, x = Two(forward).eval(), example()
    program: Any = export(model, (x,), strict=False)
    found = next(exports)
    converted = fxamp.convert(program, (x,), policy="O1,dtype=bf16", dynamic_shapes=None)
    assert len(found) == times
    if forward is writes:
        with torch.no_grad():
            got = converted(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                expected = model(x)
        assert torch.equal(got, expected.float())
        assert not any("autocast" in note for note in converted.plan.notes)  # so the rules were compared with it
    if forward is casts:
        assert any("without torch.autocast, under which the model fails" in note for note in converted.plan.notes)


def test_a_program_is_not_tried_at_small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Two(writes).eval(), example()
    program: Any = export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
    monkeypatch.setattr(sys.modules["fxamp.convert"], "guard_small_sizes", pytest.fail)
    converted = fxamp.convert(program, (x,), policy="O1,dtype=bf16")
    with torch.no_grad():
        one = converted(x[:1])
    assert one.shape[0] == 1
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(one, model(x[:1]).float())
