"""A rule that a user registers is looked up and listed, and one that makes no sense is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import library as operators

from passes.contract.errors import PolicyError
from passes.ops import rules
from passes.ops.rules import FOLLOW, FP32, KEEP, LOW, RULES, Rule

aten = torch.ops.aten


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Rule]:
    """Give the test a registry of its own."""
    fresh: dict[str, Rule] = {}
    monkeypatch.setattr(rules, "_custom", fresh)
    return fresh


def test_a_registered_rule_is_looked_up_and_listed(registry: dict[str, Rule]) -> None:
    made = rules.register_rule("my_lib::norm", FOLLOW, cuda=FP32, sensitive="range", uncast=["weight"])
    assert rules.lookup("my_lib::norm", "cpu") == (made, FOLLOW)
    assert rules.lookup("my_lib::norm", "cuda") == (made, FP32)
    assert (made.sensitive, made.uncast) == ("range", ("weight",))
    assert list(rules.rules())[-1] == made


@pytest.mark.parametrize(
    ("op", "kind", "facts", "says"),
    [
        ("my::op", "lo", {}, "the nearest name is 'low'"),
        ("my::op", "composite", {}, "is not a kind"),
        ("my::op", "low", {"cuda": "fp23"}, "the nearest name is 'fp32'"),
        ("my::op", "low", {"sensitve": "range"}, "the nearest name is 'sensitive'"),
        ("my::op", "low", {"sensitive": "ranges"}, "the nearest name is 'range'"),
        ("my::op", "low", {"uncast": "weight"}, "takes a tuple"),
        ("my::op", "low", {"same_dtype": 1}, "takes a bool"),
        ("softmax", "low", {}, "Policy"),
        (torch.ops.aten.softmax.int, "low", {}, "Policy"),
        (torch.ops.aten.absolute, "low", {}, "Policy"),  # a synonym of abs
        (3, "low", {}, "not an operator"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(
    registry: dict[str, Rule], op: Any, kind: str, facts: dict[str, Any], says: str
) -> None:
    with pytest.raises(PolicyError, match=says):
        rules.register_rule(op, kind, **facts)
    assert not registry


def test_registering_twice_is_fine_unless_it_differs(registry: dict[str, Rule]) -> None:
    first = rules.register_rule("my::op", LOW)
    assert rules.register_rule("my::op", LOW) == first
    with pytest.raises(PolicyError, match="registered before with cpu='low'"):
        rules.register_rule("my::op", FP32)
    assert registry == {"my::op": first}


def test_an_unknown_op_is_kept() -> None:
    row, kind = rules.lookup("my_lib::unheard_of", "cpu")
    assert (kind, row.reason) == (KEEP, "unknown op")


def test_an_in_place_op_has_the_row_of_its_base() -> None:
    assert rules.row_named("add_") is RULES["add"]


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, LOW), (torch.float32, FP32)])
def test_a_rule_of_register_autocast_is_read(dtype: torch.dtype, kind: str, by_name: bool) -> None:
    name = f"fxamp_test_rules::op_{kind}_{by_name}"
    if by_name:
        operators.define(name, "(Tensor x) -> Tensor")
        operators.impl(name, "cpu", torch.sin)
        operators.register_autocast(name, "cpu", dtype)
    else:
        defined = operators.custom_op(name, torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor")
        defined.register_autocast("cpu", dtype)
        assert rules._op_name(defined) == name
    row, found = rules.lookup(name, "cpu")
    assert (found, str(dtype) in row.reason) == (kind, True)
    assert rules.lookup(name, "cuda")[1] == KEEP
    assert rules.lookup(name, "cpu", low=torch.float16)[1] == (KEEP if kind == LOW else FP32)
