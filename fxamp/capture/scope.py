"""Find the module that a graph from Dynamo belongs to, and its path in the module that was compiled.

Dynamo names the inputs of a graph after local variables, and captures a model with graph breaks in pieces:
`L['self'].fc` may be `encoder.layers.3.fc`, and after a break the same layer is `L['___stack0']`. Their paths are found
from the call stack while Dynamo captures, and from the identity of modules and parameters.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from passes._torch import pytree

from .._torch import MODULE_CALLS, compiled_call, is_sharded, is_spread, original_of
from ..observe.tensors import plain
from .call import current


@dataclass(frozen=True)
class Scope:
    """The module that was compiled, and the one in it whose forward is being captured."""

    root: nn.Module  # that was compiled
    modules: dict[str, str]  # paths in it, by identity as Dynamo writes it
    names: dict[int, str]  # paths of parameters, buffers and tensors in plain attributes, by identity
    inside: tuple[tuple[str, type], ...]  # the modules around the code: path and type, from the root to the innermost
    given: tuple[Any, ...] = ()  # the leaves of the inputs of the root
    called: nn.Module | None = None  # the root, or what torch.compile has wrapped it in; None of a view

    def stack(self, node: Node) -> dict[str, tuple[str, Any]]:
        """Return the modules that a node was made in, in the form of `nn_module_stack`."""
        out: dict[str, tuple[str, Any]] = {path: (path, kind) for path, kind in self.inside}
        for key, (_, kind) in node.meta.get("nn_module_stack", {}).items():
            path = self.modules.get(key.partition("@")[0])  # "@1" marks a second call of the module
            if path is not None:
                out[path] = (path, kind)
        return out


def scope() -> Scope | None:
    """Return the scope of the graph being captured; None if something other than a module was compiled."""
    running, given, called = _running()
    if not running:
        return None
    root, innermost = running[-1], running[0]
    modules = {str(id(m)): path for path, m in root.named_modules()}
    parts = [p for p in modules.get(str(id(innermost)), "").split(".") if p]
    paths = [".".join(parts[:i]) for i in range(len(parts) + 1)]
    inside = tuple((path, type(root.get_submodule(path))) for path in paths)
    held = (*plain(root).items(), *root.named_parameters(), *root.named_buffers())
    names = {id(t): path for path, t in held}
    return Scope(root, modules, names, inside, given, called)


def is_training() -> bool:
    """Say whether the compiled module that is being called is in train mode; True if something else was compiled."""
    running, *_ = _running()
    return running[-1].training if running else True


def is_gathered() -> bool:
    """Say whether a module that FSDP2 has sharded is being called, so that its parameters are gathered."""
    call = current()
    if call is not None and gathers(call.model):
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if gathers(frame.f_locals["self"] if frame.f_code in MODULE_CALLS else None):
            return True
        frame = frame.f_back
    return False


def stays_spread(model: nn.Module) -> bool:
    """Say whether graphs read parameters that are spread over ranks, as with tensor parallelism, which none gathers."""
    return any(map(is_spread, model.parameters())) and not any(map(gathers, model.modules()))


def gathers(module: object) -> bool:
    """Say whether FSDP2 gathers the parameters of a model for its calls, which it may do in a dtype of its own."""
    # Of a view it has changed the class, and not that of its model, which shares the hooks.
    hooks = vars(module)["_forward_pre_hooks"].values() if isinstance(module, nn.Module) else ()
    return is_sharded(module) or any("fsdp" in str(getattr(hook, "__module__", "")) for hook in hooks)


def _running() -> tuple[list[nn.Module], tuple[Any, ...], nn.Module | None]:
    """Return the modules being called, innermost first, up to a compiled one, its inputs, and what is called."""
    found: list[nn.Module] = []
    parts: list[nn.Module] = []  # GraphModules: mostly made by torch.compile, rarely compiled by a user
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (call := current()) is not None and frame.f_code is call.code:
            return [*found, call.model], tuple(pytree.tree_leaves((call.args, call.kwargs))), None
        module = frame.f_locals["self"] if frame.f_code in MODULE_CALLS else None
        compiled = original_of(module)
        if module is not None and compiled is None and not isinstance(module, GraphModule):
            found.append(module)
            compiled = None if compiled_call(module) is None else module
        if isinstance(compiled, GraphModule):
            parts.append(compiled)
        elif compiled is not None:
            given = pytree.tree_leaves((frame.f_locals["args"], frame.f_locals["kwargs"]))
            return [*found, compiled], tuple(given), module
        frame = frame.f_back
    return parts[:1], (), None
