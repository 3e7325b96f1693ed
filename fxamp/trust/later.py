"""Find state that forward() leaves and that changes its later calls: a graph would compute the first call forever.

A model that may read what it has changed is called before the run with which its graph is compared. What that call left
may be there to stay, such as a cache of positions: then the run leaves the same, and the graph agrees with it. A count
goes on, and the graph has to agree with calls far later too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from passes._torch import FakeTensorMode, pytree, quiet_fakes
from passes.contract.errors import INSTEAD, NotFaithfulError

from ..capture.model.snapshot import Snapshot, outline, same_state, untouched
from .preserved import fresh, preserved

if TYPE_CHECKING:
    from ..capture.model.captured import Captured

FAR = 10**6  # calls
T = TypeVar("T")


def runs_to_compare(
    captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor], run: Callable[[], T]
) -> tuple[list[T], list[torch.Tensor]]:
    """Return what runs of a model give that its graph has to agree with, and the tensors that they wrote.

    Args:
        captured: what was captured of the model, whose Python state is not restored here.
        args: the example inputs.
        kwargs: the example keyword inputs.
        written: tensors that the graph is known to write.
        run: calls the model on the example inputs.

    Raises:
        NotFaithfulError: the model leaves state that it may read and that differs after every call.
    """
    model = captured.model
    before = Snapshot(model)
    first = _left_by_a_call(captured, before, args, kwargs, run)
    with preserved(model, written) as restored:
        results = [run()]
    changes, modules = before.changes(), dict(model.named_modules())
    moved = {name: changes.get(name) for name in captured.again if outline(changes.get(name)) != first[name]}
    for name, value in moved.items():
        owner, _, attribute = name.rpartition(".")
        if type(value) is not int or owner not in modules:
            raise _other_calls(captured, [name])
        modules[owner].__dict__[attribute] = value + FAR
    if moved:
        try:
            with preserved(model, written):
                results.append(run())
        except Exception as e:
            raise _other_calls(captured, moved) from e
    return results, restored


def _left_by_a_call(
    captured: Captured, before: Snapshot, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
) -> dict[str, Any]:
    """Call a model, on other values if it takes them; return outlines of what that leaves and the next call may read.

    Its tensors are restored, since a graph writes them too.
    """
    if not captured.again:
        return {}
    with preserved(captured.model):
        given = pytree.tree_map(_flipped, (args, kwargs))
        try:
            captured.model(*given[0], **given[1])
        except Exception:  # not every value is valid in every place
            run()
    changes = before.changes()
    return {name: outline(changes.get(name)) for name in captured.again}


def caches(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], names: Iterable[str]) -> set[str]:
    """Return those names of state that forward() changes in its first call and leaves alone in the second.

    A second call reads such a value and does not make it again; so it is a cache, and not, for example, a loss of this
    call. The model is called on fake tensors, in the state it is in; if it cannot be, no name is returned.
    """
    mode, before = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), Snapshot(model)
    with untouched(model), preserved(model), quiet_fakes(), mode, torch.compiler.set_stance("force_eager"):
        given = pytree.tree_map_only(torch.Tensor, lambda t: mode.from_tensor(t, static_shapes=True), (args, kwargs))
        left = []
        for _ in range(2):
            try:
                model(*given[0], **given[1])
            except Exception:
                return set()
            left.append(before.changes())
    return {name for name in names if name in left[0] and same_state(left[0][name], left[1].get(name))}


def _flipped(value: Any) -> Any:
    """Return other values of the same shape that are probably as valid, for example as tokens."""
    return fresh(value).detach().flip(tuple(range(value.dim()))) if isinstance(value, torch.Tensor) else value


def _other_calls(captured: Captured, names: Iterable[str]) -> NotFaithfulError:
    return NotFaithfulError(
        f"forward() changes {' and '.join(map(repr, names))} in every call, and may read it in the next; the graph "
        f"captured with '{captured.front_end}' would not. {INSTEAD}, or keep it in a buffer that is written in place."
    )
