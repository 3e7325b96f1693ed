"""The op table agrees with the lists of the installed torch, and prints."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch

from passes._torch import autocast_registrations
from passes.contract.devices import DEVICES
from passes.ops import rules
from passes.ops.rules import BANNED, FP32, LOW, PROMOTE, RULES, Rule
from passes.ops.table import row
from tests.support.helpers import OTHER_RELEASES

aten = torch.ops.aten

# Rows that are on no list of torch, but run low or in FP32 because all that they call is.
IN_EFFECT = {
    "cpu": """linalg_matmul chain_matmul linalg_multi_dot lstm rnn_tanh rnn_relu rnn_tanh_cell rnn_relu_cell nll_loss_nd
        max_unpool1d""",
    # Of the cells it has no kernel, and they call linear.
    "mps": """linalg_matmul rnn_tanh rnn_relu rnn_tanh_cell rnn_relu_cell nll_loss_nd softmin square linalg_norm""",
    "cuda": """linalg_matmul lstm rnn_tanh rnn_relu gru nll_loss_nd softmin square linalg_norm""",
}
# Registered by the part of torch that is built for CUDA alone.
ONLY_IN_CUDA_BUILDS = {"_cudnn_rnn"}


def listed(device: str) -> set[str]:
    """Return the ATen ops with an autocast kernel, without overloads."""
    names = (n.removeprefix("aten::") for n in autocast_registrations(device) if n.startswith("aten::"))
    # Its other overload, which is the one that models call, is on no list.
    return {n.partition(".")[0] for n in names if (device, n) != ("cpu", "_convolution.deprecated")}


@pytest.mark.parametrize("device", DEVICES)
def test_every_op_on_torchs_list_has_a_row_that_says_so(device: str) -> None:
    kinds = {name: rules.lookup(name, device)[1] for name in listed(device)}
    assert not {n: k for n, k in kinds.items() if k not in (LOW, FP32, PROMOTE, BANNED)}


@pytest.mark.parametrize("device", DEVICES)
def test_every_low_or_fp32_row_is_on_torchs_list_or_calls_only_what_is(device: str) -> None:
    kinds = {n: rules.lookup(n, device)[1] for n in RULES}
    named = listed(device) | ONLY_IN_CUDA_BUILDS | OTHER_RELEASES
    unlisted = {n for n, kind in kinds.items() if n not in named and kind in (LOW, FP32, BANNED)}
    assert unlisted == set((IN_EFFECT.get(device) or IN_EFFECT[DEVICES[device].lists]).split()) | (
        {"mkldnn_rnn_layer"} & unlisted
    )


def test_a_row_is_an_aten_op_or_a_function_of_torch() -> None:
    from torch.distributed.tensor import DTensor

    spaces: tuple[Any, ...] = (torch, torch.nn.functional, torch.functional, DTensor)
    here = RULES.keys() - OTHER_RELEASES
    assert not {n for n in here if not hasattr(aten, n) and not any(hasattr(s, n) for s in spaces)}


def arguments(name: str) -> set[str]:
    packet = getattr(aten, name, None)
    return {a.name for o in packet.overloads() for a in getattr(packet, o)._schema.arguments} if packet else set()


def test_arguments_that_a_row_names_exist() -> None:
    assert not {n: r.uncast for n, r in RULES.items() if not set(r.uncast) <= arguments(n)}


def test_a_row_says_whether_there_is_a_dtype_argument() -> None:
    wrong = {n for n, r in RULES.items() if hasattr(aten, n) and r.dtype_arg != ("dtype" in arguments(n))}
    # Theirs is not for what they compute: a reading of the same bits, an assertion, a layout.
    assert wrong == {"view", "view_copy", "_assert_tensor_metadata", "to_dense"}


def test_whatever_cuda_keeps_in_fp32_is_sensitive_everywhere() -> None:
    assert not {n for n, r in RULES.items() if r.cuda in (FP32, BANNED) and not r.sensitive}


def test_the_table_is_a_list_that_prints() -> None:
    table = rules.rules()
    assert len(table) >= len(RULES)
    assert table[0] == next(iter(RULES.values()))
    assert table[:3] == tuple(RULES.values())[:3]
    assert RULES["softmax"] in table
    lines = str(table).splitlines()
    assert len(lines) == len(table)
    assert any(line.split()[:5] == ["softmax", "cpu:", "follow", "cuda:", "fp32"] for line in lines)


def test_every_kind_and_field_is_explained() -> None:
    assert set(row.KIND_NAMES) == {k for r in RULES.values() for k in (r.cpu, r.cuda)}
    lines = inspect.getsource(row).splitlines()
    at = {f.name: next(i for i, line in enumerate(lines) if line.startswith(f"    {f.name}: ")) for f in fields(Rule)}
    assert [name for name, i in at.items() if "  # " not in lines[i] and not lines[i - 1].startswith("    # ")] == []
