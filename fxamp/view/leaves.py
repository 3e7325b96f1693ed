"""Low copies of weights that are leaves of autograd, for a compiled step: it casts no weight and no gradient.

    forward:   reads `low`, as the last update has written it
    backward:  leaves `low.grad` there, in 16 bits
    update:    reads `low.grad`, and writes the weight, the state of its optimizer and `low`, in one kernel

Where something needs gradients at the weights, `arrive` moves them there, in FP32.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._torch import add_together, copy_together, mark_static_address
from .copies import Lifted, contents_of

Add = Callable[[list[Tensor], list[Tensor]], None]


class _Leaf:
    """The low copy of one weight, its master."""

    __slots__ = ("both", "contents", "low", "master", "read", "sums", "total")

    def __init__(self, master: Tensor, dtype: torch.dtype) -> None:
        self.master, self.read = master, True  # a graph has read it since the window opened
        self.both = False  # the weight gets a gradient of its own too, since something reads it in FP32
        self.sums = False  # before backward the weight has a gradient, of earlier micro-batches
        self.total: Tensor | None = None  # which is here then: autograd adds up the two of each micro-batch first
        self.low = master.detach().to(dtype, copy=True).requires_grad_(master.requires_grad)
        self.contents: Any = contents_of(
            master
        )  # when it was cast, as far as can be told; None if it was stepped since
        mark_static_address(self.low)

    def fits(self, master: Tensor) -> bool:
        """Say whether a weight is the one that was cast, and can be cast into this memory."""
        low = self.low
        return (
            self.master is master and low.shape == master.shape and low.device == master.device
            and low.stride() == master.stride() and low.requires_grad == master.requires_grad
        )  # fmt: skip


class Leaves:
    """The low copies that a compiled step reads.

    A copy is cast again after its weight was written, moved or replaced, or an optimizer has stepped. A compiled update
    writes copies itself, and says so by `note_written`. An edit through `.data` shows in nothing.
    """

    def __init__(self) -> None:
        self.reason = ""  # why weights are not read through leaves
        self._leaves: dict[tuple[int, torch.dtype, int], _Leaf] = {}  # by weight, dtype and number
        hook = register_optimizer_step_post_hook(functools.partial(stepped_outside, weakref.ref(self)))
        weakref.finalize(self, hook.remove)

    def begin(self, reason: str) -> None:
        """Begin a micro-batch that reads leaves, or does not for a reason; there are none then."""
        self.reason = reason
        if reason:
            self._leaves.clear()

    def all_of(self, lifted: Iterable[Lifted], args: Sequence[Any]) -> list[Tensor]:
        """Return the copies that a graph reads: where casts share no gradient, as without a cache, a copy each."""
        numbers, copies = Counter[tuple[int, torch.dtype]](), list[Tensor]()
        for place, dtype, _, _, shared in lifted:
            numbers[id(args[place]), dtype] += not shared
            copies.append(self._of(args[place], dtype, 0 if shared else numbers[id(args[place]), dtype]))
        return copies

    def _of(self, master: Tensor, dtype: torch.dtype, number: int) -> Tensor:
        leaf = self._leaves.get((id(master), dtype, number))
        if leaf is None or not leaf.fits(master):
            leaf = self._leaves[id(master), dtype, number] = _Leaf(master, dtype)
        elif leaf.contents != contents_of(master):
            self._cast_together()
        leaf.read = True
        return leaf.low

    def of_masters(self, masters: Iterable[Tensor]) -> list[list[Tensor]]:
        """Return the copies of some weights, which are of several dtypes where views have several."""
        copies: dict[int, list[Tensor]] = defaultdict(list)
        for (weight, *_), leaf in self._leaves.items():
            copies[weight].append(leaf.low)
        return [copies.get(id(master), []) for master in masters]

    def set_aside(self) -> None:
        """Take away, before backward, what weights have that will get two gradients."""
        for leaf in self._leaves.values():
            if leaf.both and leaf.total is None:
                leaf.total, leaf.master.grad = leaf.master.grad, None
            leaf.sums = leaf.master.grad is not None

    def arrive(self, add: Add | None = None, *, where_both: bool = False) -> None:
        """Move gradients to the weights, in their dtype; with `where_both`, `add` them to those that have one."""
        first: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        for leaf in self._leaves.values():
            gradient = leaf.low.grad
            if gradient is None or (where_both and leaf.master.grad is None):
                continue
            if leaf.master.grad is None:
                leaf.master.grad = torch.empty_like(gradient, dtype=leaf.master.dtype)
                first.append((leaf.master.grad, gradient))
            else:
                leaf.both = leaf.both or not leaf.sums
                more.append((leaf.master.grad, gradient))
            leaf.low.grad = None
        aside = [] if where_both else [leaf for leaf in self._leaves.values() if leaf.total is not None]
        with torch.no_grad():
            if first:
                copy_together([to for to, _ in first], [gradient for _, gradient in first])
            if more:
                (add or add_together)([to for to, _ in more], [gradient for _, gradient in more])
            for leaf in aside:
                assert leaf.total is not None
                leaf.master.grad = leaf.total if leaf.master.grad is None else leaf.total.add_(leaf.master.grad)
                leaf.total = None

    def note_written(self, masters: Iterable[Tensor]) -> None:
        """Say that copies hold what their weights hold now."""
        numbers = set(map(id, masters))
        for leaf in self._leaves.values():
            if id(leaf.master) in numbers:
                leaf.contents = contents_of(leaf.master)

    def clear(self) -> None:
        """Drop gradients that have not arrived, and the copies that no graph has read in the window."""
        self._leaves = {key: leaf for key, leaf in self._leaves.items() if leaf.read}
        for leaf in self._leaves.values():
            leaf.low.grad, leaf.total, leaf.read = None, None, False

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has written weights, which a fused one does without a new version."""
        numbers = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for leaf in self._leaves.values():
            if id(leaf.master) in numbers:
                leaf.contents = None

    def _cast_together(self) -> None:
        stale = [leaf for leaf in self._leaves.values() if leaf.contents != contents_of(leaf.master)]
        stale = [leaf for leaf in stale if leaf.fits(leaf.master)]
        with torch.no_grad():
            copy_together([leaf.low for leaf in stale], [leaf.master for leaf in stale])
        for leaf in stale:
            leaf.contents = contents_of(leaf.master)

    def __len__(self) -> int:
        return len(self._leaves)


def stepped_outside(leaves: weakref.ref[Leaves], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Tell copies that an optimizer has stepped, as a hook on the steps of all."""
    if (found := leaves()) is not None:
        found.stepped(optimizer)
