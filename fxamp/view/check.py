"""Check what was captured of a model: run it on twins, copies of the model.

captured graphs, unconverted    under the view's autocast, on one twin
the model's own code            under the same autocast, on another
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from passes._torch import pytree
from passes.contract.errors import FxampError

from .._torch import OWN_CACHE, current_backward, forget_compiled
from ..capture.backend import recompute_as_written
from ..capture.call import Call, begin
from ..capture.inputs import Inputs
from ..errors import NotFaithfulError, in_short
from ..observe.sketch import LARGE, Sketch, distance, equal, norm, sketch
from ..observe.snapshot import same_random_state
from ..observe.tensors import dense, same
from .runner import RUN, Runner
from .twin import NoTwinError, twin_of

logger = logging.getLogger(__name__)

GRADIENT_TOLERANCE = 1e-6
ROUNDING = 1e-3  # the relative norm, without autocast, up to which a capture that differs is used


Gradients = dict[str, Tensor | Sketch | None]


@dataclass(frozen=True)
class _Run:
    """What is kept of one run: of a large tensor a sketch, so that the next run has the memory to itself."""

    outputs: list[Any]  # leaves
    buffers: dict[str, Tensor]
    gradients: Gradients | None  # None where they are not compared
    read: frozenset[tuple[int, int]]  # the pairs of outputs of which the second was computed from the first


def check_capture(runner: Runner, run: Callable[..., _Run], check: bool | str) -> None:
    """Compare what was captured with the model itself, by `run_twin`; note a difference that is torch.compile's."""
    graded = check is True and not runner.graphs.policy.level.rounds and torch.is_grad_enabled()
    try:
        expected = run("model", graded)
        if expected.gradients == {}:
            graded, expected = False, run("model", False)
    except (FxampError, NoTwinError, torch.OutOfMemoryError):
        raise
    except Exception as e:  # autocast mixes dtypes, and its kernels refuse numbers: a graph may run where it does not
        raise NoTwinError(f"the model itself raises under autocast ({in_short(e)})") from e
    difference = _difference(expected, run("graphs", graded))
    if not difference:
        return
    got, plain = run("graphs", graded), run("torch.compile", graded)
    name = type(runner.model).__name__
    note = f"capture: torch.compile of {name} alone does not compute what {name} computes: {difference}"
    if not _difference(got, plain):
        with_gradients = check is True and torch.is_grad_enabled()
        distance = _distance(*(run(what, with_gradients, exact=True) for what in ("model", "torch.compile")))
        if distance > ROUNDING:
            note = f"{note}, and by {distance:.3g} of a norm without autocast; so {name} runs as its author wrote it"
            runner.run_as_written(note)
    elif not _difference(expected, run("model", graded)):
        raise NotFaithfulError(
            f"what was captured of {name} does not compute what {name} computes: {difference}. torch.compile of it "
            "does, so this is a defect of fxamp; please report it. check=False converts it nevertheless."
        )
    else:
        note = (
            f"not checked: {name} itself does not compute the same twice: it has state outside of the model, which the "
            "check has advanced, or a kernel that varies; check=False leaves such state alone"
        )
    logger.warning("fxamp: %s", note)
    runner.graphs.note(note)


def run_twin(runner: Runner, inputs: Inputs, what: str, graded: bool, exact: bool = False) -> _Run:
    """Run the model's code, the captured graphs, or torch.compile's, on a twin; without autocast if `exact`."""
    if any(t.is_meta for t in (*runner.model.parameters(), *runner.model.buffers())):
        raise NoTwinError("it is on the meta device")
    twin, (given, named) = twin_of(runner.model, inputs)
    before = begin(Call(twin, given, named, RUN, "compare"))  # views inside the model run unconverted too
    try:
        with same_random_state():
            if what == "graphs":
                outputs = runner(given, named, model=twin, does="compare")
            else:
                outputs = _called(runner, twin, given, named, compiled=what != "model", exact=exact)
            gradients = _gradients(outputs, twin) if graded else None
    except torch.OutOfMemoryError as e:
        raise NoTwinError("there is not enough memory to run it beside itself") from e
    finally:
        begin(before)
    leaves = pytree.tree_leaves(outputs)
    values = [sketch(t) if isinstance(t, Tensor) else t for t in leaves]
    return _Run(values, dict(twin.named_buffers()), gradients, _read(leaves))


def _read(leaves: Sequence[Any]) -> frozenset[tuple[int, int]]:
    """Return the pairs of output leaves of which the second was computed from the first, by autograd's graph."""
    made = {i: t.grad_fn for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.grad_fn is not None}
    pairs = set[tuple[int, int]]()
    for at, function in made.items():
        others = {i for i, other in made.items() if other is not function}
        seen, left = {function}, [function]
        while left and others:
            nexts = {n for n, _ in left.pop().next_functions if n is not None} - seen
            seen |= nexts
            left += nexts
        pairs.update((i, at) for i in others if made[i] in seen)
    return frozenset(pairs)


def _called(runner: Runner, twin: nn.Module, args: Any, kwargs: Any, compiled: bool, exact: bool) -> Any:
    def forward(model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    def eager(gm: GraphModule, _: list[Any]) -> Any:
        recompute_as_written(gm)
        return gm.forward

    forward.__code__ = forward.__code__.replace(co_name="plain")
    run = torch.compile(forward, backend=eager, **OWN_CACHE) if compiled else forward
    try:
        with _autocast(runner, exact):
            return run(twin, *args, **kwargs)
    finally:
        forget_compiled(forward.__code__, eager)


def _autocast(runner: Runner, exact: bool) -> Any:
    """Return the region that a model's code is run in, none where it would do nothing but keep the cache of others.

    It is without autocast's cache, whose entries know no dtype: a region of another dtype inside would read them.
    """
    graphs = runner.graphs
    if graphs.policy.level.rounds and not exact:
        return graphs.region(cache=False)
    on = torch.is_autocast_enabled(graphs.device)
    return torch.autocast(graphs.device, enabled=False) if on else contextlib.nullcontext()


def _gradients(outputs: Any, twin: nn.Module) -> Gradients | None:
    """Return the gradients of a weighted sum of the outputs by name; None if nothing requires any, {} if it raises.

    A sketch is taken of each as it comes, and its memory let go.
    """
    leaves = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    sources = {name: p for name, p in twin.named_parameters() if p.requires_grad}
    if not leaves or not sources:
        return None
    sketches: Gradients = {}
    outermost: list[int] = []  # a Function of the author's may run a backward of its own inside this one

    def take(name: str, gradient: Tensor) -> Tensor | None:
        if current_backward() not in outermost:
            return None
        sketches[name] = sketch(dense(gradient))
        return None if gradient.is_sparse else gradient.new_zeros(()).expand(gradient.shape)

    handles = [p.register_hook(partial(take, name)) for name, p in sources.items()]
    handles += [leaf.register_hook(lambda _: outermost.append(current_backward())) for leaf in leaves]
    try:
        computed = torch.autograd.grad(leaves, list(sources.values()), list(map(_weights, leaves)), allow_unused=True)
    except RuntimeError:  # of a reentrant checkpoint, for example, which knows no backward of some inputs alone
        return {}
    finally:
        for handle in handles:
            handle.remove()
    others = zip(sources, computed, strict=True)
    return {name: None if g is None else sketches[name] if name in sketches else sketch(dense(g)) for name, g in others}


def _weights(output: Tensor) -> Tensor:
    """Return the weights of an output in the sum, from 0.5 to 1.5; a large one's repeat, row by row one further on."""
    numbers = output.numel() if output.numel() <= LARGE else sum(output.shape)
    ramp = torch.linspace(0.5, 1.5, max(numbers, 1), dtype=output.dtype, device=output.device)
    if output.numel() <= LARGE:
        return ramp[: output.numel()].view(output.shape)
    return ramp.as_strided(output.shape, (1,) * output.dim())


def _difference(expected: _Run, got: _Run) -> str:
    if len(expected.outputs) != len(got.outputs):
        return f"{len(got.outputs)} outputs instead of {len(expected.outputs)}"
    for i, (a, b) in enumerate(zip(expected.outputs, got.outputs, strict=True)):
        if isinstance(a, Tensor | Sketch) and not equal(a, b):
            return f"output {i} differs by {_relative(a, b)}"
    if expected.read != got.read:
        first, second = min(expected.read ^ got.read)
        return f"a gradient of output {second} by output {first} is there in only one of them"
    for name, buffer in expected.buffers.items():
        if name not in got.buffers or not same(buffer, got.buffers[name]):
            return f"buffer '{name}' has other values afterwards"
    if bool(expected.gradients) != bool(got.gradients):
        return "only one of them has gradients"
    floor, others = _floor(expected.gradients), got.gradients or {}
    for name, gradient in (expected.gradients or {}).items():
        other = others.get(name)
        if (gradient is None) != (other is None) or (gradient is not None and not _are_alike(gradient, other, floor)):
            return f"the gradient of '{name}' differs"
    return ""


def _distance(expected: _Run, got: _Run) -> float:
    """Return the largest relative norm by which outputs and gradients of two runs differ."""
    ours, theirs = (run.gradients or {} for run in (expected, got))
    pairs = [*zip(expected.outputs, got.outputs, strict=False), *((g, theirs.get(name)) for name, g in ours.items())]
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor | Sketch) and isinstance(b, Tensor | Sketch)]
    if len(expected.outputs) != len(got.outputs):
        return float("inf")
    floor = max(_floor(expected.gradients), 1e-30)
    return max((distance(a, b) / max(norm(a), floor) for a, b in tensors if not equal(a, b)), default=0.0)


def _are_alike(a: Any, b: Any, floor: float) -> bool:
    return distance(a, b) <= max(GRADIENT_TOLERANCE * norm(a), floor) or equal(a, b)  # NaN, too


def _floor(gradients: Gradients | None) -> float:  # the distance that does not count
    return 1e-9 * max((norm(g) for g in (gradients or {}).values() if g is not None), default=0.0)


def _relative(a: Any, b: Any) -> str:
    if not isinstance(b, Tensor | Sketch) or a.shape != b.shape:
        return "its shape"
    return f"{distance(a, b) / max(norm(a), 1e-30):.3g} of its norm"
