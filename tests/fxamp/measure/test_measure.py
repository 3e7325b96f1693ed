from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxamp.measure.counts import laps, step_counts


def test_counts_each_cast_and_the_bytes_it_reads_and_writes() -> None:
    x = torch.randn(10, requires_grad=True)

    counts = step_counts(lambda: x.to(torch.bfloat16).to(torch.float32).sum())

    # FP32 to BF16 and back, and the same again in backward: four casts of 10 elements, 4 and 2 bytes each.
    assert (counts.casts, counts.cast_bytes) == (4, 4 * 10 * 6)


def test_copies_that_keep_the_dtype_are_no_casts() -> None:
    x = torch.randn(10, requires_grad=True)

    assert step_counts(lambda: x.clone().contiguous().sum()).casts == 0


def test_casts_to_an_integer_dtype_do_not_count() -> None:
    x = torch.randn(10, requires_grad=True)

    assert step_counts(lambda: x.to(torch.int64).sum() * x.sum()).casts == 0


def test_a_batched_copy_is_one_cast() -> None:
    low = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.bfloat16)]
    full = [torch.ones(3), torch.ones(5)]
    x = torch.randn(2, requires_grad=True)

    def loss() -> Tensor:
        torch._foreach_copy_(low, full)
        return x.sum()

    counts = step_counts(loss)

    assert (counts.casts, counts.cast_bytes) == (1, (3 + 5) * (2 + 4))


def test_a_copy_into_another_dtype_is_a_cast() -> None:
    low, full = torch.zeros(3, dtype=torch.bfloat16), torch.ones(3)
    x = torch.randn(2, requires_grad=True)

    def loss() -> Tensor:
        low.copy_(full)
        full.copy_(full + 1)
        torch._foreach_copy_([full], [full + 1])
        return x.sum()

    counts = step_counts(loss)

    assert (counts.casts, counts.cast_bytes) == (1, 3 * (2 + 4))


def test_saved_bytes_leave_parameters_out_and_count_a_storage_once() -> None:
    norm = nn.LayerNorm(16)
    x = torch.randn(4, 16, requires_grad=True)

    # mul saves its operand (once, as both operands), layer_norm its input, mean and rstd; its weight is a parameter.
    def loss() -> Tensor:
        y = x * x
        return norm(y).sum()

    assert step_counts(loss).saved_bytes == x.nbytes + x.nbytes + 2 * 4 * 4


def test_autocast_of_a_linear_layer_casts_input_weight_and_bias_once_each_way() -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x).sum()

    # Forward: input, weight, bias. Backward: the gradients of weight and bias, as the input needs none.
    assert step_counts(loss).casts == 5


def test_counts_repeat_and_random_numbers_are_left_alone() -> None:
    x = torch.randn(64, requires_grad=True)
    state = torch.get_rng_state()

    first = step_counts(lambda: F.dropout(x, 0.5).sum())

    assert torch.equal(torch.get_rng_state(), state)
    x.grad = None
    assert step_counts(lambda: F.dropout(x, 0.5).sum()) == first


def test_every_round_is_told_apart() -> None:
    calls: list[str] = []

    seconds = laps({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, range(3))

    assert calls == ["a", "b"] * 3
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 3, "b": 3}
    assert laps({"a": calls.clear}, []) == {"a": []}
