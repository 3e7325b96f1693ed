"""Scopes in which casts of weights are kept: `cast_once` for training, `frozen` for inference.

fxamp cannot detect every edit of a weight (`weight.data.copy_(new)` leaves no trace), and validation is where libraries
make such edits. So `cast_once` keeps nothing there, and by entering `frozen` the user promises that there are none.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from passes.ops.rules import row_of

from .._torch import compiled_call, is_sharded, original_of
from ..capture.graph import Graph, copied
from ..errors import NotAModuleError
from .copies import Copies, Lifted, casts_before_checkpoints, casts_inside, is_plain, weight_casts
from .runner import Runner
from .view import is_view, runner_of

logger = logging.getLogger("fxamp")

# Wrappers that put other tensors in the parameters' place for a call, or copy the module for it.
_REPLACE_PARAMETERS = ("DataParallel", "FullyShardedDataParallel")


@contextlib.contextmanager
def cast_once(model: Any) -> Iterator[Any]:
    """Cast each weight once between two updates, in a training loop of one's own or of a library.

    Inside, each weight that a view reads in 16 bits is cast when it is first read, and again after an optimizer has
    stepped it, or after it was written, moved or replaced. So the micro-batches of a window share one cast. Gradients
    arrive in FP32 at the weights, bit for bit as without.

    Copies are read by calls that record gradients, of a view in train mode. Other calls cast what they read: libraries
    swap weights through `.data` for validation, which nothing shows. For inference there is `fxamp.frozen`.

    A torch.optim.Optimizer says that it has stepped, and an update by hand changes the version of a weight. Where
    neither is seen, as under DeepSpeed's engine, each backward ends the copies, and a line of the log says so. A weight
    that is written through `.data` in train mode, between an optimizer's step and the next backward, has to be written
    before the first forward of the window.

    Args:
        model: A module that `fxamp.convert` or `fxamp.compile` returned, or one with such modules inside, such as
            DistributedDataParallel. Copies take 2 bytes for each element of a weight that is read low. Weights that
            FSDP gathers, and those of modules compiled in place, are cast at each call, and a line of the log says so.

    Raises:
        NotAModuleError: Nothing in `model` is a converted module.
        CaptureError: The module is frozen.

    Example:
        >>> with fxamp.cast_once(converted):
        ...     for _ in range(4):
        ...         nn.functional.cross_entropy(converted(x), y).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """
    parts = list(parts_of(model)) if isinstance(model, nn.Module) else []
    views = [(module, reason) for _, module, reason in parts if is_view(module)]
    if not views:
        raise NotAModuleError(
            f"fxamp.cast_once takes the view of a module that fxamp.convert returned, or a module with views inside, "
            f"not {type(model).__name__}"
        )
    level = logging.WARNING if all(reason for _, reason in views) else logging.INFO
    for path, module, reason in parts:
        if reason:
            name = path or type(module).__name__
            logger.log(level, "fxamp: cast_once: casts of weights of %s are not kept: it %s", name, reason)
    copies = Copies("cast_once", type(model).__name__)
    with contextlib.ExitStack() as scope:
        keep(scope, copies, [runner_of(view) for view, reason in views if not reason])
        yield model


def keep(scope: contextlib.ExitStack, copies: Copies, runners: Iterable[Runner]) -> None:
    """Let views read copies until a scope closes, and a step of an optimizer end those of its weights."""
    for runner in runners:
        scope.callback(runner.opened.close, copies)
        runner.opened.open(copies, type(runner.model).__name__)
    scope.callback(register_optimizer_step_post_hook(copies.stepped).remove)


def parts_of(model: nn.Module, path: str = "", reason: str = "") -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the views of a model, and other modules that keep casts from being kept: path, module, and the reason."""
    found = reason or _why_not(model)
    if is_view(model) or found != reason:
        yield path, model, found
    for name, child in model.named_children():
        yield from parts_of(child, f"{path}.{name}".removeprefix("."), found)


def _why_not(module: nn.Module) -> str:
    if compiled_call(module) is not None:
        return "is compiled in place, by graphs that cast weights themselves"
    original = original_of(module)
    if original is not None and not any(map(is_view, original.modules())):
        return "is compiled by torch.compile, whose graphs cast weights themselves"
    if type(module).__name__ in _REPLACE_PARAMETERS:
        return f"is a {type(module).__name__}, which replaces parameters at each call"
    inside = runner_of(module).model.modules() if is_view(module) else ()
    if is_sharded(module) or any(map(is_sharded, inside)):
        return "is sharded by FSDP2, which gathers weights again for every call"
    return ""


@contextlib.contextmanager
def frozen(converted: Any) -> Iterator[Any]:
    """Cast every weight once, on entry; inside, calls use those copies.

    It is for inference: inside the region edits of the weights that are cast have no effect, and no gradient reaches
    them. After the region the module casts weights at every call, as before.

    Args:
        converted: A module that `fxamp.convert` or `fxamp.compile` returned. For every weight that a graph reads in 16
            bits, whatever its shape, a 16-bit copy is kept until the region ends. A weight that no graph captured so
            far reads is cast when one first does.

    Raises:
        NotAModuleError: `converted` is not a converted module.
        CaptureError: The module is frozen already.

    Example:
        >>> with torch.no_grad():
        ...     expected = converted(x)
        ...     with fxamp.frozen(converted):
        ...         bool((converted(x) == expected).all())
        True
    """
    if not is_view(converted):
        raise NotAModuleError(
            f"fxamp.frozen takes the view of a module that fxamp.convert returned, not {type(converted).__name__}; "
            "weights='low' casts those of a graph for good."
        )
    runner = runner_of(converted)
    copies = Copies("frozen")
    try:
        runner.opened.open(copies, type(runner.model).__name__)
        parameters = runner.model.named_parameters(remove_duplicate=False)
        named = {path: p for path, p in parameters if is_plain(p)}
        with torch.no_grad():
            for graph in runner.graphs:
                for path, what, _ in weights_of(graph)[0]:
                    if path in named:
                        copies.of(named[path], what.dtype)
        yield converted
    finally:
        runner.opened.close(copies)


def weights_of(graph: Graph) -> tuple[list[tuple[str, Lifted, int]], dict[str, str]]:
    """Return names, casts and counts of the weights that can be lifted out of a graph, and why others stay, by name."""
    names, gm = graph.names, graph.emitted
    if any(n.op == "call_function" and row_of(n).recomputed for n in gm.graph.nodes):
        casts_before_checkpoints(gm := copied(gm), names)
    casts = [
        (names[what.place], what, 1 + any(row_of(user).recomputed for user in node.users))
        for node, what in weight_casts(gm.graph, names)
    ]
    return casts, dict(casts_inside(gm, names))
