"""`nn.LSTM`, `nn.GRU` and `nn.RNN` as functions of their weights, so that a symbolic graph can cast each weight.

The batch and the initial state are read from the input when the graph runs, as the modules do.

Before: rnn = nn.LSTM(8, 16); rnn(x)                      After: lstm(x, None, [rnn.weight_ih_l0, ...], True, 1, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._torch import VF


def lstm(
    x: Tensor | PackedSequence, hx: Sequence[Tensor] | None, weights: list[Tensor], bias: bool, layers: int,
    dropout: float, training: bool, bidirectional: bool, batch_first: bool, proj_size: int,
) -> Any:  # fmt: skip
    """Run an LSTM. Returns (output, (h_n, c_n)), shapes as `torch.nn.LSTM` gives them."""
    config, hidden = (bias, layers, dropout, training, bidirectional), weights[0].shape[0] // 4
    out, (h, c) = _by(VF.lstm, x, hx or (None, None), weights, (proj_size or hidden, hidden), config, batch_first)
    return out, (h, c)


def rnn(
    x: Tensor | PackedSequence, hx: Tensor | None, weights: list[Tensor], bias: bool, layers: int,
    dropout: float, training: bool, bidirectional: bool, batch_first: bool, nonlinearity: str,
) -> Any:  # fmt: skip
    """Run an Elman RNN. Returns (output, h_n), shapes as `torch.nn.RNN` gives them."""
    kernel = VF.rnn_tanh if nonlinearity == "tanh" else VF.rnn_relu
    config = (bias, layers, dropout, training, bidirectional)
    out, (h,) = _by(kernel, x, (hx,), weights, (weights[0].shape[0],), config, batch_first)
    return out, h


def gru(
    x: Tensor | PackedSequence, hx: Tensor | None, weights: list[Tensor], bias: bool, layers: int,
    dropout: float, training: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """Run a GRU. Returns (output, h_n), shapes as `torch.nn.GRU` gives them."""
    config = (bias, layers, dropout, training, bidirectional)
    out, (h,) = _by(VF.gru, x, (hx,), weights, (weights[0].shape[0] // 3,), config, batch_first)
    return out, h


def _by(
    kernel: Callable[..., Any], x: Tensor | PackedSequence, initial: Sequence[Tensor | None], weights: list[Tensor],
    hidden: Sequence[int], config: tuple[Any, ...], batch_first: bool,
) -> Any:  # fmt: skip
    """Run a layer with these initial states, each of a hidden size; return its output and its final states."""
    _, layers, _, _, bidirectional = config
    steps, sizes, batch = _steps(x, batch_first)
    count = layers * (2 if bidirectional else 1)
    states = [_state(h, x, steps, (count, batch, size)) for h, size in zip(initial, hidden, strict=True)]
    state = states if len(states) > 1 else states[0]
    if sizes is None:
        out, *final = kernel(steps, state, weights, *config, batch_first)
    else:
        out, *final = kernel(steps, sizes, state, weights, *config)
    return _output(out, x, batch_first), [_final(h, x) for h in final]


def _steps(x: Tensor | PackedSequence, batch_first: bool) -> tuple[Tensor, Tensor | None, int]:
    """Return the input as the kernels take it, the batch sizes of a packed one, and the batch."""
    if isinstance(x, PackedSequence):
        return x.data, x.batch_sizes, int(x.batch_sizes[0])
    if x.dim() not in (2, 3):
        raise ValueError(f"a recurrent layer takes an input of 2 or 3 dimensions, not {x.dim()}")
    batch_dim = 0 if batch_first else 1
    steps = x if x.dim() == 3 else x.unsqueeze(batch_dim)
    return steps, None, steps.shape[batch_dim]


def _state(initial: Tensor | None, x: Tensor | PackedSequence, steps: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return an initial state as the kernels take it: zeros where none is given, in the order of a packed batch."""
    if initial is None:
        return torch.zeros(shape, dtype=steps.dtype, device=steps.device)
    state = initial if isinstance(x, PackedSequence) or x.dim() == 3 else initial.unsqueeze(1)
    if state.shape != shape:  # a state of batch size 1 would be expanded silently
        raise RuntimeError(f"the initial state of a recurrent layer must have shape {shape}, not {tuple(state.shape)}")
    order = x.sorted_indices if isinstance(x, PackedSequence) else None
    return state if order is None else state.index_select(1, order)


def _output(out: Tensor, x: Tensor | PackedSequence, batch_first: bool) -> Tensor | PackedSequence:
    if isinstance(x, PackedSequence):
        return PackedSequence(out, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
    return out if x.dim() == 3 else out.squeeze(0 if batch_first else 1)


def _final(state: Tensor, x: Tensor | PackedSequence) -> Tensor:
    """Return a final state in the order and rank of the input."""
    if isinstance(x, PackedSequence):
        return state if x.unsorted_indices is None else state.index_select(1, x.unsorted_indices)
    return state if x.dim() == 3 else state.squeeze(1)
