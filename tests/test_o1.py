"""O1 rounds what `torch.autocast` rounds: forward bit for bit, gradients as near to the truth, never more casts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node

import fxamp
from fxamp.measure import step_counts
from passes.plan import DEVIATIONS
from passes.values import keys
from tests.harness import converted, distance, floats, oracle, run, set_mode, subject
from tests.models import BY_NAME

# FP16 gradients are counted here, not trained on.
pytestmark = pytest.mark.filterwarnings("ignore:FP16 gradients without a loss scale")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Record(Interpreter):
    """Keeps what every node gave."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.made: dict[str, object] = {}

    def run_node(self, n: Node) -> object:
        self.made[n.name] = super().run_node(n)
        return self.made[n.name]


def first_difference(name: str, policy: str, dtype: torch.dtype) -> str:
    """Return the key of the first node whose value differs from what autocast gives the unrounded graph."""
    found, plain, module = subject(name), converted(name, "O0"), converted(name, policy)
    flat = module.call_spec.bind(found.args, found.kwargs)
    expected, got = _Record(plain), _Record(module)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=dtype):
            expected.run(*flat)
        got.run(*flat)
    names = keys(plain.graph)
    for node in plain.graph.nodes:
        a, b = expected.made.get(node.name), got.made.get(node.name)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and node in names and not torch.equal(a.float(), b.float()):
            return names[node]
    return ""


@pytest.mark.parametrize("low", DTYPES)
@pytest.mark.parametrize("name", BY_NAME)
def test_o1_forward_in_eval_is_autocast_bit_for_bit_or_says_why(name: str, low: str) -> None:
    found, module = subject(name), converted(name, f"O1,dtype={low}")
    set_mode(found, module, False)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=DTYPES[low]):
            expected = floats(found.model(*found.args, **found.kwargs))
        got = floats(module(*found.args, **found.kwargs))
    assert len(expected) == len(got) > 0
    if all(torch.equal(a.float(), b.float()) for a, b in zip(expected, got, strict=True)):
        return
    key = first_difference(name, f"O1,dtype={low}", DTYPES[low])
    decision = next(d for d in module.plan.decisions if d.key == key)
    assert decision.code in DEVIATIONS, decision


@pytest.mark.parametrize("name", BY_NAME)
def test_o1_gradients_are_within_twice_autocasts_distance_from_float64(name: str) -> None:
    found, module = subject(name), converted(name)
    set_mode(found, module, False)
    _, truth = oracle(found)
    got = run(module, found)[1]

    class Autocast(nn.Module):
        def forward(self, *args: object, **kwargs: object) -> object:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return found.model(*args, **kwargs)

    expected = run(Autocast(), found)[1]
    assert distance(got, truth) <= 2 * distance(expected, truth)


def casts(name: str, policy: str) -> tuple[int, int, int]:
    """Count the casts of a training step under autocast and converted, and the floating outputs."""
    found, module = subject(name), converted(name, policy)
    set_mode(found, module, True)
    low = fxamp.plan_of(module).policy.dtype

    def under_autocast() -> Tensor:
        with torch.autocast("cpu", dtype=low):
            return found.zoo.loss(found.model(*found.args, **found.kwargs))

    expected = step_counts(under_autocast)
    got = step_counts(lambda: found.zoo.loss(module(*found.args, **found.kwargs)))
    found.model.zero_grad(set_to_none=True)
    outputs = len(floats(module(*found.args, **found.kwargs)))
    return expected.casts, got.casts, outputs


@pytest.mark.parametrize("policy", ["O1,dtype=bf16", "O2,dtype=bf16", "O1,dtype=fp16"])
@pytest.mark.parametrize("name", BY_NAME)
def test_a_training_step_never_casts_more_than_autocast(name: str, policy: str) -> None:
    expected, got, outputs = casts(name, policy)
    assert 0 < got <= expected + max(0, outputs - 1)
