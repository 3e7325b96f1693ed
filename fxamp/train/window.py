"""The window of a training step: what is known of it, and open, from its first micro-batch to its end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from passes.contract.errors import PolicyError

from .._torch import is_profiling, norms_of
from ..observe import workload
from ..observe.workload import output_of
from .ranks.ranks import Ranks, agree, exchange, exchanged, groups_of, local
from .scaler import LossScaler, forget_step, scale_of

if TYPE_CHECKING:
    from .step import TrainStep

LossFunction = Callable[..., Tensor]
Weight = float | Tensor
UNWEIGHTED: float = float("1.0")  # the object itself says that no weight was given; all ranks give weights, or none


def loss_of(model: nn.Module, loss_fn: LossFunction | None, inputs: Any, target: Any) -> tuple[Tensor, Any]:
    """Call the model on inputs, and the loss function on its output and a target; return the loss and the output."""
    output = output_of(model, inputs)
    return workload.loss_of(output, target, loss_fn)[0], output


def refuse_constant(loss: Tensor, optimizers: Iterable[Optimizer]) -> None:
    """Raise PolicyError if parameters are trainable and a loss depends on none of them."""
    if not loss.requires_grad and any(p.requires_grad for o in optimizers for p in parameters(o)):
        raise PolicyError(
            "the loss does not depend on any trainable parameter: look for torch.no_grad(), .detach() or "
            ".item() in the model or in loss_fn"
        )


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def live(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters that have gradients."""
    return [p for o in optimizers for group in o.param_groups for p in group["params"] if p.grad is not None]


def gradients(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the gradients that there are."""
    return [p.grad for p in live(optimizers) if p.grad is not None]


def first_with_gradient(optimizers: Iterable[Optimizer]) -> Tensor | None:
    """Return the first parameter of some optimizers that has a gradient."""
    return next((p for o in optimizers for g in o.param_groups for p in g["params"] if p.grad is not None), None)


def holds_inf_or_nan(tensors: list[Tensor]) -> Tensor:
    """Return 1.0 on the device if any number is not finite, on any rank that has a part of them, else 0.0."""
    parts = [part.detach() for part in map(local, tensors) if part.numel()]
    parts = [part.coalesce().values() if part.is_sparse else part for part in parts]
    parts = [part for part in parts if part.numel()]
    parts = [torch.view_as_real(part.resolve_conj()) if part.is_complex() else part for part in parts]
    if parts and all(part.device.type == "cpu" for part in parts):
        # On a CPU this takes a thirtieth of the time of the norms.
        bounds = torch.stack([bound.double() for part in parts for bound in part.aminmax()])
    else:
        bounds = torch.stack([bound.to(parts[0].device) for bound in norms_of(parts, math.inf)] or [torch.zeros(())])
    found = (bounds - bounds).ne(0).any().float()  # inf - inf is NaN; isfinite() would take several kernels
    return agree(found, groups_of(tensors))


class Mean(NamedTuple):
    """What the gradients of a window are the mean of."""

    kept: int | Tensor  # micro-batches, over all ranks that have a replica
    nothing: Tensor | None = None  # on the device, nonzero if every weight was 0; None where that cannot happen


class Window:
    """One window of a step, whose micro-batches read low copies of weights; its scale may be one of its own."""

    def __init__(self, step: TrainStep, scale: float | None = None) -> None:
        self.scaler = step.scaler if scale is None else LossScaler(init_scale=scale, dynamic=False)
        self.given_scale, self.size = scale, step.accumulate_steps
        self._casts, self._ranks = step.weights, step.ranks
        self.position, self.weighted = 0, False  # micro-batches seen so far, and whether weights were given
        self.exchanged = True  # the last backward has exchanged gradients, where replicas do
        self.losses: list[tuple[Tensor, Weight]] = []  # detached, of shape (), each with its weight over the first's
        self.batches: list[tuple[Any, Any]] = []  # inputs and target, as far as somebody may run them again
        self.reference: Weight | None = None  # the first weight, or 1 where that is 0
        self._saved: Weight = 0.0  # the weights before a checkpoint of a version that saved no losses
        self._scale: float | Tensor | None = None

    @property
    def share(self) -> Weight:
        """The sum of the weights of its micro-batches, over the first one's."""
        return sum((share for _, share in self.losses), self._saved)

    @property
    def scale(self) -> float | Tensor:
        """Its loss scale, a copy that no update changes; it stays on the device."""
        if self._scale is None:
            self._scale = scale_of(self.scaler)
        return self._scale

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Let a micro-batch run: it reads the copies of weights, and the last one exchanges gradients."""
        with self._ranks.exchanging(self.position + 1 == self.size), self._casts.read():
            yield

    def close(self) -> None:
        """Leave nothing of it: no copy is valid, and nothing is unscaled."""
        self._casts.end()
        forget_step(self.scaler)

    def share_of(self, weight: Weight, device: torch.device) -> Weight:
        """Return the weight of a micro-batch over that of the first one, the same reference on all ranks."""
        if isinstance(weight, Tensor):
            if weight.numel() != 1:
                raise PolicyError(
                    f"weight must be a number or a tensor of one element, got shape {tuple(weight.shape)}"
                )
        elif not isinstance(weight, (int, float)) or isinstance(weight, bool) or not 0 <= weight < math.inf:
            raise PolicyError(f"weight must be a finite number from 0 on, or a tensor of one element, got {weight!r}")
        if weight is UNWEIGHTED and not self.weighted:
            self.reference = 1.0
            return 1.0
        if self.reference is None:
            self.reference = _reference(weight, self._ranks, device)
        self.weighted = True
        share = weight / self.reference
        return share.detach() if isinstance(share, Tensor) else share

    def took(self, loss: Tensor, share: Weight) -> None:
        """Note a micro-batch whose gradients are there."""
        self.position += 1
        self.losses.append((loss, share))

    def average(self, optimizers: Sequence[Optimizer], *, in_backward: bool) -> Mean:
        """Make gradients the mean over micro-batches, before they are unscaled: the check for inf sees the means.

        Those of each are multiplied by its weight and divided by `size`; `in_backward` says that the last backward has
        exchanged them.
        """
        ranks, weight, total = self._ranks, self.share, self.position * self._ranks.replicated
        if self.weighted and not isinstance(weight, Tensor) and weight == 0:
            raise PolicyError("every weight of this window is 0, so its gradients have no mean: leave it out")
        done: set[Tensor] = set()
        if ranks.replicas and not in_backward:
            counts = torch.stack([torch.as_tensor(n, dtype=torch.float32) for n in (weight, self.position)])
            for replica in reversed(ranks.replicas):
                params = exchanged(replica)
                total = exchange(replica, counts.to(params[0].device), self.size)[1]  # type: ignore[assignment]
                done.update(params)
        # A rank without micro-batches has taken part in the exchange, and has nothing of its own.
        factor: float | Tensor = self.size / weight if isinstance(weight, Tensor) or weight else 1.0
        if self.weighted and ranks.groups and not done:
            factor = self.size * ranks.averaged / ranks.sum(torch.as_tensor(weight, dtype=torch.float64).clone())
        if isinstance(factor, Tensor) or factor != 1:
            with torch.no_grad():
                for p in (p for o in optimizers for p in parameters(o) if p not in done):
                    if p.grad is not None:
                        p.grad.mul_(factor)
        return Mean(total, (weight == 0).float() if isinstance(weight, Tensor) else None)

    def state(self) -> dict[str, Any]:
        """Return it as plain values and tensors, without batches."""
        return {
            "position": self.position, "given_scale": self.given_scale, "losses": self.losses[:],
            "reference": self.reference, "weighted": self.weighted,
        }  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state` returned."""
        self.position, self.losses = state["position"], [tuple(each) for each in state.get("losses", ())]
        self._saved = 0.0 if "losses" in state else state.get("share", float(state["position"]))
        self.reference, self.weighted = state.get("reference", 1.0), state.get("weighted", False)


def open_window(step: TrainStep, scale: float | None = None) -> Window:
    """Open a window of a step with a scale of its own, or return the one that is open."""
    if step.opened is None:
        window = Window(step, scale)
        step.loop.before_window(scaled=step.undecided or window.scaler.is_enabled(), in_place=step.in_place)
        step.opened = window
    return step.opened


def close_window(step: TrainStep) -> None:
    """Leave the window that is open, without a step, if one is; what was cut off can be repeated."""
    if step.opened is not None:
        step.opened.close()
        if step.compiled is not None:
            step.compiled.leaves.clear()
        step.loop.after_window(in_place=step.in_place)
        step.opened = None


def _reference(weight: Weight, ranks: Ranks, device: torch.device) -> Weight:
    """Return the first weight of the first rank, or 1 where that is 0; between ranks it is broadcast once."""
    if not ranks.groups and not isinstance(weight, Tensor):
        return float(weight) or 1.0
    found = weight.detach().view(()) if isinstance(weight, Tensor) else torch.tensor(weight, dtype=torch.float64)
    found = found.to(device, torch.float64, copy=True) if ranks.groups else found
    found = torch.where(found == 0, torch.ones_like(found), found)
    for group in ranks.groups:
        dist.broadcast(found, dist.get_global_rank(group, 0), group=group)
    return found


def range_of(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a range that a profiler shows, for a part of a step."""
    return record_function(f"fxamp.{name}") if is_profiling() else contextlib.nullcontext()
