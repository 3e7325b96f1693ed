"""A cast of a weight that is kept: made when first read, and read again until its window ends.

A kept cast is the tensor that the graph's own cast would produce, with its autograd node. So gradients flow as usual:
in FP32 to the master weight, through its hooks, and accumulated as in a plain loop.

In a compiled step it is a leaf where nothing can tell the difference; then its gradient is added to the weight's after
backward (`fxamp.train.compiled.gradient_sums`).

Before: to = w.to(torch.bfloat16)
After:  to = kept_to(w, torch.bfloat16)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from passes._torch import has_hooks, in_transform, run_as_soon_as_ready

from .together import Place, one_launch_pays

Given = tuple[Tensor, Tensor]


class GraphInputs:
    """The inputs of a compiled graph that stand for kept casts: each a weight and its cast, None where it is not kept.

    They are passed as arguments, since AOTAutograd's cache identifies inputs by their source: a kept cast, as a global
    of generated code, would have another name in each process.
    """

    def __init__(self) -> None:
        self.given: list[Given | None] = []

    def begin(self, given: Sequence[Given | None]) -> None:
        """Set them for the code that `torch.compile` traces next; one that is used is taken out."""
        self.given = list(given)

    def of(self, at: int) -> Given | None:
        """Return what stands at a position; None in code that is traced outside of a compiled step, as in a loss."""
        return self.given[at] if at < len(self.given) else None


class KeptCast:
    """A cast of one weight, called instead of all equal casts of this weight in one graph or several.

    It casts again if the weight is another object than before, was written to, or moved. An edit through `.data`
    leaves no trace in a tensor, and is not seen before the cast is forgotten.

    In code that `torch.compile` traces, the kept copy is an input of the graph.

    Args:
        cast: What the graph calls: `cast(weight, dtype)`.
        name: Its name in generated code.
        inputs: Where it finds the inputs of a graph that `torch.compile` traces.
        at: Its position there.

    Attributes:
        at: As given.
        alone: Whether nothing but this cast reads the weight in compiled graphs, and no hook waits for its gradient.
            None before a graph was compiled.
        place: Memory for the next window's copy, if many copies are made by one launch.
    """

    def __init__(self, cast: Callable[[Tensor, torch.dtype], Tensor], name: str, inputs: GraphInputs, at: int) -> None:
        self.__name__ = self.__qualname__ = name
        self._cast = cast
        self._inputs, self.at = inputs, at
        self.alone: bool | None = None
        self._weight: Tensor | None = None
        self._low: Tensor | None = None
        self.place: Place | None = None
        self._version, self._pointer, self._trained = 0, 0, False
        self._used = False  # whether a forward used it whose backward has not run

    def __call__(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight in `dtype`."""
        if torch.compiler.is_dynamo_compiling():
            return self._given(weight, dtype)
        low = self._kept(weight, dtype, leaf=False)
        if low is None:
            return self._cast(weight, dtype)
        if not torch.is_grad_enabled():
            return low
        if self._used and low.requires_grad:
            if in_transform():
                return self._cast(weight, dtype)
            return _Again.apply(weight, low)  # type: ignore[no-untyped-call, no-any-return]
        self._used = True
        return low

    def becomes_leaf(self, weight: Tensor) -> bool:
        """Say whether the copy that is made next will be a leaf, if nobody holds the weight's autograd node.

        A place whose copy is no leaf holds that node, and is given up then.
        """
        if not self.alone or not weight.requires_grad or self._low is not None:
            return False
        if torch.is_inference_mode_enabled() or has_hooks(weight):
            return False
        if self.place is not None and not self.place.low.is_leaf:
            self.place = None
        return True

    def make_ready(self, weight: Tensor, dtype: torch.dtype) -> Given | None:
        """Make the cast for a compiled graph, unless it is there; return the weight and it, None if it is not kept."""
        self._used = False
        leaf = bool(self.alone) and weight.requires_grad
        leaf = leaf and (self._low is None or is_trained_leaf(self._low))  # within a window no copy becomes a leaf
        if leaf and has_hooks(weight):
            self.alone = leaf = False
        low = self._kept(weight, dtype, leaf)
        return None if low is None or low is weight else (weight, low)

    def take_gradient(self) -> Given | None:
        """Return the weight and the gradient that backward left at the cast, which then has none; None without one."""
        low, weight = self._low, self._weight
        if low is None or weight is None or not is_trained_leaf(low) or low.grad is None:
            return None
        gradient, low.grad = low.grad, None
        return weight, gradient

    def _given(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the graph input while `torch.compile` traces; a second use in a micro-batch casts in the graph.

        So does another weight in the place of this one, as `torch.func.functional_call` puts it there.
        """
        given = self._inputs.of(self.at)
        if given is None or weight is not given[0]:
            return self._cast(weight, dtype)
        if torch.is_grad_enabled():
            self._inputs.given[self.at] = None
        return given[1]

    def next_micro_batch(self) -> None:
        """Note that a backward has run: the next use may read the kept copy as the first one did."""
        self._used = False

    def forget(self) -> None:
        """Free the kept copy; keep its `Place` if it can be reused. A cast that was never read has none."""
        if self.place is not None and self._low is self.place.low:
            self.place.empty()
        elif self.place is not None and self.place.filled:
            self.place = None
        self._weight = self._low = None

    def _kept(self, weight: Tensor, dtype: torch.dtype, leaf: bool) -> Tensor | None:
        """Return the kept copy, which is made if there is none that holds; None where none may be kept."""
        low = self._low
        if (
            low is not None
            and weight is self._weight
            and weight._version == self._version
            and weight.data_ptr() == self._pointer
            and weight.requires_grad is self._trained
            and is_trained_leaf(low) is leaf
        ):
            return low
        if type(weight) is not torch.nn.Parameter or torch.is_inference_mode_enabled() or in_transform():
            return None
        return self._make(weight, dtype, leaf)

    def _make(self, weight: Tensor, dtype: torch.dtype, leaf: bool) -> Tensor:
        if self.place is not None and self.place.holds(weight) and is_trained_leaf(self.place.low) is leaf:
            low = self.place.low
        else:
            with torch.set_grad_enabled(not leaf):
                low = self._cast(weight, dtype)
            if not leaf:
                run_as_soon_as_ready(low)
            elif low is not weight:
                low.requires_grad_()
            self.place = Place(weight, low) if low is not weight and one_launch_pays(weight) else None
        if low is not weight:
            self._weight, self._low, self._used = weight, low, False
            self._version, self._pointer, self._trained = weight._version, weight.data_ptr(), weight.requires_grad
        return low


def is_trained_leaf(low: Tensor) -> bool:
    """Say whether a cast is a leaf whose gradient stays at it, and not at the weight."""
    return low.is_leaf and low.requires_grad


class _Again(torch.autograd.Function):
    """A second use of a cast in a micro-batch, without another copy: the gradients of both are summed in FP32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, low: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return low.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None
