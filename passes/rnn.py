"""`nn.LSTM` and `nn.RNN` as functions of their weights, so that a symbolic graph can cast each weight.

The batch and the initial state are read from the input when the graph runs, as the modules do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def lstm(
    x: Tensor | PackedSequence, hx: tuple[Tensor, Tensor] | None, weights: list[Tensor], bias: bool, layers: int,
    dropout: float, training: bool, bidirectional: bool, batch_first: bool, proj_size: int,
) -> Any:  # fmt: skip
    """Run an LSTM. Returns (output, (h_n, c_n)), shapes as `torch.nn.LSTM` gives them."""
    batched, sizes, x3 = _batched(x, batch_first)
    directions = 2 if bidirectional else 1
    hidden = weights[0].shape[0] // 4
    if hx is None:
        batch = x3.shape[0 if batch_first else 1] if sizes is None else int(sizes[0])
        h = torch.zeros(layers * directions, batch, proj_size or hidden, dtype=x3.dtype, device=x3.device)
        c = torch.zeros(layers * directions, batch, hidden, dtype=x3.dtype, device=x3.device)
    else:
        h, c = (s if batched else s.unsqueeze(1) for s in hx)
    if sizes is None:
        out, h, c = torch._VF.lstm(  # type: ignore[attr-defined]
            x3, (h, c), weights, bias, layers, dropout, training, bidirectional, batch_first
        )
    else:
        out, h, c = torch._VF.lstm(  # type: ignore[attr-defined]
            x3, sizes, (h, c), weights, bias, layers, dropout, training, bidirectional
        )
    return _unbatched(x, out, batched, batch_first), ((h, c) if batched else (h.squeeze(1), c.squeeze(1)))


def rnn(
    x: Tensor | PackedSequence, hx: Tensor | None, weights: list[Tensor], bias: bool, layers: int,
    dropout: float, training: bool, bidirectional: bool, batch_first: bool, nonlinearity: str,
) -> Any:  # fmt: skip
    """Run an Elman RNN. Returns (output, h_n), shapes as `torch.nn.RNN` gives them."""
    batched, sizes, x3 = _batched(x, batch_first)
    hidden = weights[0].shape[0]
    if hx is None:
        batch = x3.shape[0 if batch_first else 1] if sizes is None else int(sizes[0])
        hx = torch.zeros(layers * (2 if bidirectional else 1), batch, hidden, dtype=x3.dtype, device=x3.device)
    elif not batched:
        hx = hx.unsqueeze(1)
    kernel = torch._VF.rnn_tanh if nonlinearity == "tanh" else torch._VF.rnn_relu  # type: ignore[attr-defined]
    if sizes is None:
        out, h = kernel(x3, hx, weights, bias, layers, dropout, training, bidirectional, batch_first)
    else:
        out, h = kernel(x3, sizes, hx, weights, bias, layers, dropout, training, bidirectional)
    return _unbatched(x, out, batched, batch_first), h if batched else h.squeeze(1)


def _batched(x: Tensor | PackedSequence, batch_first: bool) -> tuple[bool, Tensor | None, Tensor]:
    if isinstance(x, PackedSequence):
        return True, x.batch_sizes, x.data
    if x.dim() == 2:
        return False, None, x.unsqueeze(0 if batch_first else 1)
    return True, None, x


def _unbatched(x: Tensor | PackedSequence, out: Tensor, batched: bool, batch_first: bool) -> Any:
    if isinstance(x, PackedSequence):
        return PackedSequence(out, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
    return out if batched else out.squeeze(0 if batch_first else 1)
