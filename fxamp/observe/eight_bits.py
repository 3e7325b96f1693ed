"""Modules that compute in 8 bits by themselves, as torchao's Float8Linear does: no plan rounds there, or counts it.

Such a module is a subclass of one of torch.nn's, over the same parameters: what it was made of is that class's forward.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

from torch import Tensor, nn

from passes.contract.errors import PolicyError

_PACKAGE = "torchao"


def eight_bit_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by path, the modules of a model whose forward torchao has written."""
    return {path: m for path, m in model.named_modules() if _owner(getattr(type(m), "forward", None)) == _PACKAGE}


def listed(modules: dict[str, nn.Module]) -> str:
    """Return how many modules there are, their classes, and the first paths."""
    kinds = ", ".join(dict.fromkeys(type(m).__name__ for m in modules.values()))
    more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
    return f"{len(modules)} modules of {_PACKAGE} ({kinds}: {', '.join(list(modules)[:3])}{more})"


@contextlib.contextmanager
def as_made_of(model: nn.Module) -> Iterator[None]:
    """Let modules that compute in 8 bits compute inside as those that they were made of.

    Raises:
        PolicyError: what one was made of is not kept: its class is none of torch.nn's, or its weights are quantized.
    """
    changed = eight_bit_modules(model)
    plain = {path: _plain_forward(path, module) for path, module in changed.items()}
    before = {path: module.__dict__.get("forward") for path, module in changed.items()}
    try:
        for path, module in changed.items():
            module.__dict__["forward"] = plain[path]
        yield
    finally:
        for path, module in changed.items():
            module.__dict__.pop("forward", None)
            if (own := before[path]) is not None:
                module.__dict__["forward"] = own


def _plain_forward(path: str, module: nn.Module) -> types.MethodType:
    base = next((c for c in type(module).__mro__ if c is not nn.Module and c.__module__.startswith("torch.nn.")), None)
    quantized = [name for name, p in module.named_parameters(recurse=False) if type(p.data) is not Tensor]
    if base is None or quantized:
        what = f"its {quantized[0]} is a {type(module.get_parameter(quantized[0]).data).__name__}" if quantized else (
            "its class is none of torch.nn's")  # fmt: skip
        raise PolicyError(
            f"'{path}' ({type(module).__name__}) computes in 8 bits, and what it was made of is not kept ({what}): "
            "errors would be measured against 8 bits. Give the model as it was before that conversion."
        )
    return types.MethodType(getattr(base, "forward"), module)  # noqa: B009 - a type has none, as a checker sees it


def _owner(function: object) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]
