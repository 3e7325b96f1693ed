"""What passes hand on: choices that nobody changes, and new nodes that have all that a node needs."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch

from fxamp.capture.graph import attribute_of
from passes.assign.assign_precision import AssignPrecision
from passes.casts.insert_casts import InsertCasts
from passes.contract.errors import VerificationError
from passes.contract.policy import Policy, Target
from passes.form import Ensures, Unit
from passes.graph.notes import note_of
from passes.pipeline import _run
from tests.support.graphs import LAYER, parse

POLICY = Policy("O1", dtype=torch.bfloat16, device="cpu")


class _Inserts:
    """A pass that puts a row sum before the relu, in one way or another."""

    name: ClassVar = "inserts"
    ensures: ClassVar = Ensures.DTYPES

    def __init__(self, by_hand: bool) -> None:
        self.by_hand = by_hand

    def __call__(self, unit: Unit) -> dict[str, int]:
        linear, relu = (next(n for n in unit.graph.nodes if n.name == name) for name in ("linear", "relu"))
        op, args = torch.ops.aten.sum.dim_IntList, (linear, [1], True)
        if self.by_hand:
            with unit.graph.inserting_before(relu):
                new = unit.graph.call_function(op, args)
        else:
            new = unit.insert(op, args, before=relu, by="inserts/sum")
        relu.args = (new,)
        return {"sum": 1}


def unit() -> Unit:
    gm = parse(LAYER)
    steps = (AssignPrecision(POLICY), InsertCasts())
    return _run(Unit(gm.graph, functools.partial(attribute_of, gm), Target.of(POLICY)), steps, Counter())


def test_nothing_that_was_decided_can_be_changed() -> None:
    decided: Any = unit().decided
    for mapping in (decided.colours, decided.dtypes, decided.original, decided.returned, decided.autocast):
        with pytest.raises(TypeError, match="does not support item assignment"):
            mapping[next(iter(mapping))] = None


def test_an_inserted_node_has_a_value_its_dtypes_and_a_note() -> None:
    before = unit()
    after = _run(before, (_Inserts(by_hand=False),), Counter())
    new = next(n for n in after.graph.nodes if note_of(n).made_by == "inserts/sum")
    assert new.meta["val"].shape == (2, 1)
    assert (after.decided.original[new], after.decided.dtypes[new]) == (torch.float32, torch.bfloat16)
    assert new not in before.decided.dtypes


def test_a_node_that_a_pass_inserts_without_its_dtypes_is_named_with_the_way_out() -> None:
    with pytest.raises(VerificationError, match=r"sum .* has no dtype: .*Unit\.insert"):
        _run(unit(), (_Inserts(by_hand=True),), Counter())
