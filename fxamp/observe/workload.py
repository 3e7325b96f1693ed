"""What a diagnostic is given: `f(model_or_step, inputs, target=None, *, loss=None, batches=None)`, for all of them.

inputs    a tensor, or a tuple for model(*inputs); a mapping for model(**inputs)
loss      a function of the output, or of output and target; None: the output's own; a TrainStep brings its own
batches   an iterable of inputs or of (inputs, target), in the place of `inputs`
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from passes._torch import pytree
from passes.contract.errors import CaptureError, PolicyError

from ..errors import NoLossError, NotAModuleError
from .snapshot import fresh, same_attributes, same_random_state
from .tensors import held, kept

MEAN = "the loss was the mean of the float outputs: no loss was given, and the output has none"
Loss = Callable[..., Any] | None
Batch = tuple[Any, Any]


@dataclass(frozen=True)
class GivenStep:
    """A model, the batches of a diagnostic, and how a loss is made of them.

    Attributes:
        model: what is run: a model, a view, or a converted graph.
        batches: pairs of inputs and target, at least one.
        loss: a function of the output, or of output and target; None for the output's own loss.
        step: the TrainStep that was given, None for a model.
    """

    model: nn.Module
    batches: tuple[Batch, ...]
    loss: Loss = None
    step: Any = None

    @property
    def example(self) -> tuple[Any, Any]:
        """The inputs of the first batch, as positional and as keyword inputs of `convert`."""
        inputs = self.batches[0][0]
        return (None, inputs) if isinstance(inputs, Mapping) else (inputs, None)

    def scale(self, asked: float | None) -> float:
        """Return the loss scale that is asked for; None is that of the TrainStep, else 1.

        Raises:
            PolicyError: it is not a finite number above 0.
        """
        if asked is None:
            return float(self.step.scaler.get_scale()) if self.step is not None else 1.0
        if not isinstance(asked, (int, float)) or isinstance(asked, bool) or not 0 < asked < math.inf:
            raise PolicyError(f"scale is a loss scale, a finite number above 0, not {asked!r}.")
        return float(asked)

    def unlike(self) -> Iterator[Batch]:
        """Yield the batches that are given otherwise than all before them: those may take another path."""
        seen = list[Any]()
        for batch in self.batches:
            leaves, spec = pytree.tree_flatten(batch)
            kind = spec, [(t.dtype, t.dim()) if isinstance(t, Tensor) else t if t is None else type(t) for t in leaves]
            if kind not in seen:
                seen.append(kind)
                yield batch

    @contextlib.contextmanager
    def as_before(self, model: nn.Module, written: Collection[int] | None = None) -> Iterator[list[Tensor]]:
        """Restore what a step changes, of a model and of a loss that is a module."""
        of_loss = as_before(self.loss) if isinstance(self.loss, nn.Module) else contextlib.nullcontext()
        with of_loss, as_before(model, written) as restored:
            yield restored

    def run(self, model: nn.Module, batch: Batch) -> tuple[Any, Tensor]:
        """Run a model, or one that is called alike, on copies of the inputs of one batch; return output and loss.

        Raises:
            PolicyError: there is no loss, or it has more elements than one.
        """
        inputs, target = copies(batch)
        output = output_of(model, inputs)
        return output, loss_of(output, target, self.loss)[0]


def given_step(
    model_or_step: Any, inputs: Any = None, target: Any = None, *, loss: Loss = None,
    batches: Iterable[Any] | None = None,
) -> GivenStep:  # fmt: skip
    """Read what a diagnostic is given; among `batches` two inputs of a model are written as a mapping.

    Raises:
        NotAModuleError: there is no model.
        CaptureError: the model is on the meta device.
        PolicyError: there are no batches, or batches beside inputs; or a TrainStep is given a loss.
    """
    model = model_of(model_or_step)
    step = None if model_or_step is model else model_or_step
    if step is not None and loss is not None:
        raise PolicyError("a TrainStep brings its own loss: leave out loss=.")
    if (inputs is None) == (batches is None):
        raise PolicyError("give inputs, or batches= in their place.")
    if batches is None:
        listed: tuple[Batch, ...] = ((inputs, target),)
    elif target is not None:
        raise PolicyError("with batches= a target comes with its batch: give pairs (inputs, target).")
    else:
        if not isinstance(batches, Iterable):
            raise PolicyError(f"batches= is an iterable of inputs, not {type(batches).__name__}.")
        listed = tuple(_batch(one) for one in batches)
    if not listed:
        raise PolicyError("batches= is empty: give at least one batch.")
    return GivenStep(model, listed, step.loss_fn if step is not None else loss, step)


def _batch(one: Any) -> Batch:
    """Return inputs and target; what a DataLoader yields for a data set of pairs is a list."""
    pair = isinstance(one, (tuple, list)) and len(one) == 2 and not isinstance(one, PackedSequence)
    return (one[0], one[1]) if pair else (tuple(one) if isinstance(one, list) else one, None)


def model_of(model_or_step: Any) -> nn.Module:
    """Return the model of a TrainStep, or the model itself.

    Raises:
        NotAModuleError: it is neither.
        CaptureError: the model is on the meta device, where nothing runs.
    """
    model = model_or_step if isinstance(model_or_step, nn.Module) else getattr(model_or_step, "model", None)
    if not isinstance(model, nn.Module):
        raise NotAModuleError(f"a torch.nn.Module or a TrainStep is needed, not {type(model_or_step).__name__}.")
    if any(p.is_meta for p in model.parameters()):
        raise CaptureError(
            f"{type(model).__name__} is on the meta device, where nothing runs: fxamp.plan decides for such a model; "
            "to run it, make it on a device, with model.to_empty(device=...)."
        )
    return model


def copies(values: Any) -> Any:
    """Copy tensors, one that is given twice once: Dynamo guards which inputs are the same."""
    made: dict[int, Any] = {}
    return pytree.tree_map(lambda v: made.setdefault(id(v), fresh(v)) if isinstance(v, Tensor) else v, values)


@contextlib.contextmanager
def as_before(model: nn.Module, written: Collection[int] | None = None) -> Iterator[list[Tensor]]:
    """Restore random states, what a model holds, its parameters, their gradients (None inside), and attributes.

    Yields a list, which afterwards holds the tensors that were restored: of the parameters those `written`, given by
    their identities, if that is known.
    """
    parameters = list(model.parameters())
    before = [(p, p.grad, p.requires_grad) for p in parameters]
    restored = [p for p in parameters if written is None or id(p) in written]
    everything = {id(t): t for t in (*held(model).values(), *restored)}
    with same_random_state(), same_attributes(model), kept(everything.values()) as found:
        for p in parameters:
            p.grad = None
        try:
            yield found
        finally:
            for p, gradient, requires_grad in before:
                p.grad = gradient
                if p.requires_grad != requires_grad:
                    p.requires_grad_(requires_grad)


def output_of(model: nn.Module, inputs: Any) -> Any:
    """Call a model, by `model(**inputs)`, `model(*inputs)` or `model(inputs)`.

    Raises:
        PolicyError: the inputs are of another kind.
    """
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence):
        return model(*inputs)
    if isinstance(inputs, (Tensor, PackedSequence)):
        return model(inputs)
    raise PolicyError(
        "inputs is a tensor, a tuple for model(*inputs) or a mapping for model(**inputs), not "
        f"{type(inputs).__name__}: give tuple(inputs) for several inputs, (inputs,) for a single one, and of a "
        "DataLoader the inputs of one batch."
    )


def loss_of(output: Any, target: Any, loss: Loss, *, any_will_do: bool = False) -> tuple[Tensor, tuple[str, ...]]:
    """Return the loss of an output, by a function or its own, and what is to be said of it.

    Where there is none, and `any_will_do`, it is the mean of the float outputs.

    Raises:
        PolicyError: there is no loss, there are several, or it has more elements than one.
    """
    if loss is not None:
        found = loss(output) if target is None else loss(output, target)
        require_loss(found)
        return found, ()
    if target is not None:
        raise PolicyError(
            "a target was given, the third argument, without loss= (loss_fn of a TrainStep): give both, or leave out "
            "the target; two inputs of a model are one tuple, (x, y)."
        )
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = output if found is None and isinstance(output, Tensor) and not output.dim() else found
    if isinstance(found, Tensor) and found.is_floating_point() and found.numel() == 1:
        return found, ()
    leaves = floats(output)
    if any_will_do and leaves:
        graded = [t for t in leaves if t.requires_grad] or leaves
        return torch.stack([t.float().mean() for t in graded]).mean(), (MEAN,)
    scalars = sum(not t.dim() for t in leaves)
    what = "no loss and no tensor of floats" if not leaves else f"{scalars} scalars" if scalars > 1 else "no loss"
    if found is not None:
        what = f"a loss that is {_described(found)}, not a tensor of one element"
    raise NoLossError(f"the output ({type(output).__name__}) has {what}")


def floats(output: Any) -> list[Tensor]:
    """Return the tensors of a floating dtype in an output, in the order of its leaves."""
    return [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


def require_loss(loss: object) -> None:
    """Raise PolicyError unless a loss is a tensor of one element."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        raise PolicyError(f"the loss must be a tensor of one element, not {_described(loss)}.")


def _described(value: Any) -> str:
    kind = "a complex one" if isinstance(value, Tensor) and value.is_complex() else "one"
    return f"{kind} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
