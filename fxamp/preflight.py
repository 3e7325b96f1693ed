"""What a front end would lose without a word is refused by name: module, construct, file and line, way out."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import nn

from passes.errors import CaptureError

_WAY_OUT = 'Use fxamp.compile(model) or model.compile(backend="fxamp"), which keep it'
_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_FLAG_METHODS = ("train", "eval")


def refuse_hooks(model: nn.Module, front_end: str) -> None:
    """Raise CaptureError for a hook or a train() override, which a captured graph would not run."""
    for path, module in model.named_modules(remove_duplicate=False):
        where = f"module '{path or '(root)'}' ({type(module).__name__})"
        for attribute, kind in _HOOKS.items():
            for hook in getattr(module, attribute).values():
                label = getattr(hook, "__qualname__", type(hook).__name__)
                if label in ("WeightNorm", "SpectralNorm"):
                    raise CaptureError(
                        f"{where} uses torch.nn.utils's old {label}, a {kind} that recomputes the weight on the module "
                        f"itself; capture='{front_end}' would read a stale weight. Use torch.nn.utils.parametrizations instead."
                    )
                raise CaptureError(
                    f"{where} has a {kind} ({label}), which a graph captured with '{front_end}' would not run. {_WAY_OUT}, or "
                    "remove the hook before converting."
                )
        for method in _FLAG_METHODS:
            defined = getattr(type(module), method, None)
            if defined is not getattr(nn.Module, method) and not type(module).__module__.startswith(("torch.", "transformers.")):
                raise CaptureError(
                    f"{where} overrides {method}(), which the converted module would not call. {_WAY_OUT}, or set the flags of "
                    "the submodules outside."
                )


def _user_frame() -> str:
    """Return file and line of the innermost frame outside torch and fxamp."""
    for frame in reversed(traceback.extract_stack()):
        name = frame.filename.replace("\\", "/")
        if "/torch/" not in name and "/fxamp/" not in name and "/contextlib.py" not in name and "/unittest/" not in name:
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return "an unknown place"


def _from_torch() -> bool:
    """Say whether the construct is used by torch's own machinery rather than on behalf of a model."""
    for frame in traceback.extract_stack()[-6:-2][::-1]:
        name = frame.filename.replace("\\", "/")
        if "/contextlib.py" in name or "/unittest/" in name or "/fxamp/preflight" in name or "_contextlib.py" in name:
            continue
        return "/torch/" in name and "/torch/nn/" not in name
    return False


def _refuse(construct: str, front_end: str, loss: str) -> None:
    raise CaptureError(f"{construct} at {_user_frame()}: capture='{front_end}' {loss}. {_WAY_OUT}.")


@contextlib.contextmanager
def refuse_constructs(front_end: str) -> Iterator[None]:
    """Raise CaptureError when the model, while being captured, uses what this front end drops or inlines."""

    def refusing(target: Any, attribute: str, construct: str, loss: str) -> Any:
        original = target.__dict__[attribute]
        plain = original.__func__ if isinstance(original, (classmethod, staticmethod)) else original

        def patched(*args: Any, **kwargs: Any) -> Any:
            if not _from_torch():
                _refuse(construct, front_end, loss)
            return plain(*args, **kwargs)

        return mock.patch.object(target, attribute, classmethod(patched) if isinstance(original, classmethod) else patched)

    inlined = "would inline it and lose its"
    patches = [
        refusing(torch.utils.checkpoint, "checkpoint", "torch.utils.checkpoint.checkpoint", f"{inlined} recomputation"),
        refusing(torch.utils.checkpoint, "checkpoint_sequential", "checkpoint_sequential", f"{inlined} recomputation"),
        refusing(torch.autograd.Function, "apply", "a torch.autograd.Function", f"{inlined} backward"),
    ]
    if front_end == "export":
        patches.append(refusing_method("register_hook", "Tensor.register_hook", front_end, "would drop the hook"))
    if front_end == "fx":
        region = "would drop the region"
        patches += [
            refusing(torch.no_grad, "__enter__", "a torch.no_grad region", region),
            refusing(torch.enable_grad, "__enter__", "a torch.enable_grad region", region),
            refusing(torch.set_grad_enabled, "__init__", "torch.set_grad_enabled", region),
            refusing(torch.inference_mode, "__enter__", "a torch.inference_mode region", region),
            refusing(torch.autocast, "__enter__", "a torch.autocast region", region),
        ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def refusing_method(name: str, construct: str, front_end: str, loss: str) -> Any:
    """Return a patch that refuses a Tensor method."""
    original = getattr(torch.Tensor, name)

    def patched(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _from_torch():
            _refuse(construct, front_end, loss)
        return original(self, *args, **kwargs)

    return mock.patch.object(torch.Tensor, name, patched)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore every module's attributes, parameters, buffers and children as they were, whatever happens inside."""
    saved = []
    for module in model.modules():
        tables = {k: dict(module.__dict__[k]) for k in ("_parameters", "_buffers", "_modules")}
        saved.append((module, dict(module.__dict__), tables))
    try:
        yield
    finally:
        for module, attributes, tables in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for key, table in tables.items():
                module.__dict__[key].clear()
                module.__dict__[key].update(table)
