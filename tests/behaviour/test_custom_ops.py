"""Kernels of others get what their rule says, and without a rule what the policy says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch import library as operators

import fxamp
from tests.support.front_ends import BF16, FRESH, casts, convert, each_front_end, one
from tests.support.helpers import Two
from tests.support.kernels import kernels

pytestmark = FRESH
__all__ = ["kernels"]


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_a_kernel_with_a_rule_gets_low_values_without_a_cast(front_end: str, kernels: Any) -> None:
    model = Two(lambda self, x: self.m(kernels.attention(*(self.l(x),) * 3))).requires_grad_(False)
    module = convert(model, one(), front_end, "O1,output_dtype=low", check=False)
    assert module(*one()).dtype == BF16
    assert [n.all_input_nodes[0].op for n in casts(module)].count("call_function") == 0


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_a_kernel_that_writes_to_its_operand_writes_to_the_original(front_end: str, kernels: Any) -> None:
    def counting(self: Any, x: Tensor) -> Tensor:
        total = torch.zeros(6)
        return self.m(kernels.count(total, self.l(x))) + total

    model = Two(counting).requires_grad_(False)
    module = convert(model, one(), front_end)
    torch.testing.assert_close(module(*one()), model(*one()), rtol=0.03, atol=0.05)


@pytest.mark.default_case(front_end="view")
@each_front_end
@pytest.mark.parametrize("choice", ["keep", "fp32", "error"])
def test_an_op_without_a_rule_is_treated_as_the_policy_says(choice: str, front_end: str) -> None:
    with operators._scoped_library("fxamp_unlisted", "FRAGMENT") as library:
        library.define("unlisted(Tensor x) -> Tensor")
        library.impl("unlisted", lambda x: x * 2, "CompositeExplicitAutograd")
        operators.register_fake("fxamp_unlisted::unlisted", lambda x: torch.empty_like(x), lib=library)
        model = Two(lambda self, x: self.m(torch.ops.fxamp_unlisted.unlisted(self.l(x)))).requires_grad_(False)
        policy = f"O1,unknown_ops={choice}"
        if choice == "error":
            with pytest.raises(Exception, match=r"fxamp_unlisted::unlisted .*fxamp\.register_rule"):
                convert(model, one(), front_end, policy)(*one())
            return
        module = convert(model, one(), front_end, policy)
        torch.testing.assert_close(module(*one()), model(*one()), rtol=0.02, atol=0.02)
        decision = next(d for d in fxamp.plan_of(module).decisions if "unlisted" in d.op)
        assert decision.colour == "float32"
        assert decision.code == {"keep": "keep", "fp32": "unknown_op"}[choice]


@pytest.mark.default_case(front_end="graph")
@each_front_end
@pytest.mark.parametrize("where", ["kernel", "fake kernel"])
def test_an_op_that_refuses_16_bits_is_named_with_the_override_that_helps(front_end: str, where: str) -> None:
    def refuses(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise RuntimeError("float, please")
        return x * 2

    with operators._scoped_library("fxamp_picky", "FRAGMENT") as library:
        library.define("picky(Tensor x) -> Tensor")
        library.impl("picky", refuses, "CompositeExplicitAutograd")
        fake = refuses if where == "fake kernel" else lambda x: torch.empty_like(x)
        operators.register_fake("fxamp_picky::picky", fake, lib=library)

        class Inside(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.ops.fxamp_picky.picky(x)

        model = Two(lambda self, x: self.m(self.inside(self.l(x))), inside=Inside()).requires_grad_(False)
        with pytest.raises(RuntimeError, match="float, please") as caught:
            convert(model, one(), front_end, "O1,dtype=bf16")(*one())
        if hasattr(caught.value, "__notes__"):  # Python 3.10 has none
            note = "\n".join(caught.value.__notes__)
            for said in ("fxamp_picky::picky of 'inside'", "test_custom_ops.py:", "ops.fxamp_picky::picky=fp32"):
                assert said in note
        helped = convert(model, one(), front_end, "O1,dtype=bf16,ops.fxamp_picky::picky=fp32", check=False)
        torch.testing.assert_close(helped(*one()), model(*one()), rtol=0.02, atol=0.02)
