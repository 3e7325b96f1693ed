"""What a diagnostic is given, for all of them in one way.

f(model_or_step, inputs=None, target=None, *, kwargs=None, loss=None, batches=None, policies=None)

inputs    a tensor, or a tuple for model(*inputs); a mapping for model(**inputs)
kwargs    keyword inputs beside positional ones
loss      a function of the output, or of output and target; None: the output's own; a TrainStep brings its own
batches   an iterable of inputs or of (inputs, target), in the place of `inputs`; see `Batches`
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.utils.rnn import PackedSequence

from passes._torch import pytree
from passes.contract.errors import CaptureError, PolicyError

from ..capture.emitted import record_on
from ..capture.graph import Graph
from ..capture.user_graph import flat_inputs
from ..convert import convert, converted_in
from ..errors import NotAModuleError
from ..observe.snapshot import random_state, set_random_state
from ..observe.watch import observed
from ..observe.workload import Both, Loss, as_before, copies, loss_of, output_of

MOST = 8  # batches of an iterable that is no sequence
Batch = tuple[Any, Any]


class Batches(Sequence[Batch]):
    """Pairs of inputs and target, each taken when it is asked for, and held for those who ask again.

    Of a list or a tuple all are taken. Of anything else, such as a DataLoader or a generator, which may have no end,
    it is the first 8. A loader is iterated anew, and its generators, and those that all share, are as before.

    Args:
        source: yields inputs, or (inputs, target).
        split: tells inputs and target of what is yielded.
    """

    def __init__(self, source: Iterable[Any], split: Callable[[Any], Batch] = lambda one: one) -> None:
        self._source, self._split = source, split
        self._most = len(source) if isinstance(source, (list, tuple)) else MOST
        self._held: list[Batch] = []
        self._left: Iterator[Any] | None = None
        self._stream: list[Any] | None = None

    def _take(self, count: int) -> None:
        """Take batches until there are so many, or no more."""
        while len(self._held) < min(count, self._most):
            generators = _generators(self._source)
            before = [random_state(), *(g.get_state() for g in generators)]
            try:
                _set_streams(generators, self._stream)
                self._left = iter(self._source) if self._left is None else self._left
                self._held.append(self._split(next(self._left)))
            except StopIteration:
                self._most = len(self._held)
            finally:
                self._stream = [random_state(), *(g.get_state() for g in generators)]
                _set_streams(generators, before)

    def __len__(self) -> int:
        self._take(self._most)
        return len(self._held)

    @overload
    def __getitem__(self, at: int) -> Batch: ...
    @overload
    def __getitem__(self, at: slice) -> list[Batch]: ...
    def __getitem__(self, at: int | slice) -> Batch | list[Batch]:
        last = at.stop if isinstance(at, slice) else at + 1
        self._take(self._most if last is None or last <= 0 else last)
        return self._held[at]

    def __iter__(self) -> Iterator[Batch]:
        at = 0
        while True:
            self._take(at + 1)
            if at >= len(self._held):
                return
            yield self._held[at]
            at += 1


def _generators(source: Any) -> list[torch.Generator]:
    """Return the generators that a DataLoader and its samplers draw from."""
    samplers = [source, getattr(source, "sampler", None), getattr(source, "batch_sampler", None)]
    samplers += [getattr(samplers[2], "sampler", None)]
    found = {id(g): g for s in samplers if isinstance(g := getattr(s, "generator", None), torch.Generator)}
    return list(found.values())


def _set_streams(generators: Sequence[torch.Generator], states: Sequence[Any] | None) -> None:
    if states is not None:
        set_random_state(states[0])
        for generator, state in zip(generators, states[1:], strict=True):
            generator.set_state(state)


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
    batches: Sequence[Batch]
    loss: Loss = None
    step: Any = None

    @property
    def example(self) -> tuple[Any, Any]:
        """The inputs of the first batch, as positional and as keyword inputs of `convert`."""
        inputs = self.batches[0][0]
        if isinstance(inputs, Both):
            return inputs.args, inputs.kwargs
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
    model_or_step: Any, inputs: Any = None, target: Any = None, *, kwargs: Mapping[str, Any] | None = None,
    loss: Loss = None, batches: Iterable[Any] | None = None,
) -> GivenStep:  # fmt: skip
    """Read what a diagnostic is given.

    Raises:
        NotAModuleError: there is no model.
        CaptureError: the model is on the meta device.
        PolicyError: there are no batches, or batches beside inputs; or a TrainStep is given a loss.
    """
    model = model_of(model_or_step)
    step = None if model_or_step is model else model_or_step
    if step is not None and loss is not None:
        raise PolicyError("a TrainStep brings its own loss: leave out loss=.")
    loss = step.loss_fn if step is not None else loss
    if kwargs:
        if batches is not None or isinstance(inputs, Mapping):
            raise PolicyError("kwargs= are keyword inputs beside positional ones: give a mapping, or batches, alone.")
        inputs = dict(kwargs) if inputs is None or inputs == () else Both(_positional(inputs), dict(kwargs))
    if (inputs is None) == (batches is None):
        raise PolicyError("give inputs, or batches= in their place.")
    if batches is None:
        return GivenStep(model, ((inputs, target),), loss, step)
    if target is not None:
        raise PolicyError("with batches= a target comes with its batch: give pairs (inputs, target).")
    if not isinstance(batches, Iterable):
        raise PolicyError(f"batches= is an iterable of inputs, not {type(batches).__name__}.")
    needs, most = _arity(model)
    listed = batches if isinstance(batches, Batches) else Batches(batches, lambda one: _split(one, needs, most, loss))
    if not listed[:1]:
        raise PolicyError("batches= is empty: give at least one batch.")
    return GivenStep(model, listed, loss, step)


def one_policy(policies: Any) -> Any:
    """Return the policy that is asked for; None where none is.

    Raises:
        PolicyError: there are several.
    """
    if not isinstance(policies, (list, tuple)):
        return policies
    if len(policies) != 1:
        raise PolicyError(f"this diagnostic takes one policy, not {len(policies)}: ask for one after the other.")
    return policies[0]


def _positional(inputs: Any) -> tuple[Any, ...]:
    return inputs if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence) else (inputs,)


def _arity(model: nn.Module) -> tuple[int, float]:
    """Return how many positional inputs a model needs, and how many it takes."""
    inner = getattr(model, "module", model)  # of a wrapper, which takes anything
    try:
        every = inspect.signature(inner.forward).parameters.values()
    except (TypeError, ValueError):
        return 0, math.inf
    named = [p for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    any_number = any(p.kind is p.VAR_POSITIONAL for p in every)
    return sum(p.default is p.empty for p in named), math.inf if any_number else len(named)


def _split(one: Any, needs: int, most: float, loss: Loss) -> Batch:
    """Return inputs and target. What a DataLoader yields for a data set of pairs is a list.

    Two tensors are inputs and target, unless the model needs two inputs. Of more than the model takes the last is the
    target.
    """
    if not isinstance(one, (tuple, list)) or isinstance(one, PackedSequence):
        return one, None
    whole = tuple(one)
    if len(whole) == 2 and not (needs >= 2 and isinstance(whole[0], (Tensor, PackedSequence))):
        return whole
    if loss is not None and len(whole) > most:
        return (whole[0] if len(whole) == 2 else whole[:-1]), whole[-1]
    return whole, None


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


def converted_by(given: GivenStep, policies: Any) -> GivenStep:
    """Return a step whose model is converted by a policy, if one is asked for.

    Raises:
        PolicyError: several are asked for, or the model is converted already, or it is that of a TrainStep.
    """
    policy = one_policy(policies)
    if policy is None:
        return given
    if given.step is not None or converted_in(given.model):
        what = "a TrainStep has the policy of its model" if given.step is not None else "this model is converted"
        raise PolicyError(f"{what}: leave out policies=, or give the model that it was made of.")
    return replace(given, model=convert(given.model, policy=policy, check=False))


@contextlib.contextmanager
def watched_graphs(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Put what a watch can see in the place of the `forward` of converted graphs."""
    changed = [part for part in parts if isinstance(part, GraphModule) and record_on(part) is not None]
    for part in changed:
        part.__dict__["forward"] = _by_node(part, Graph(part, (record_on(part) or {})["plan"], part))
    try:
        yield
    finally:
        for part in changed:
            del part.__dict__["forward"]


def _by_node(part: GraphModule, given: Graph) -> Callable[..., Any]:
    run = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        inputs = tuple(flat_inputs(part, args, kwargs))
        return part.graph.process_outputs(observed(given, part, "eager", run, inputs))

    return forward
