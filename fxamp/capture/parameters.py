"""Which parameters a model may have: those that are trained are FP32, and others are taken as they are.

Updates below the resolution of 16 bits vanish, so a trainable parameter in 16 bits is refused. In eval mode, without
gradients, and where a model is only captured to read its plan, nothing is trained, and the plan notes it. Frozen
parameters may have any dtype. Weights of a tensor subclass, such as quantized ones, are opaque: what reads them runs as
under `torch.autocast`, and the plan lists them.
"""

from __future__ import annotations

import contextlib
import dis
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from passes.contract.errors import PolicyError
from passes.contract.policy import Policy
from passes.graph.values import LOW_DTYPES

from .._torch import is_spread
from ..observe.reference import eight_bit_modules, listed
from .scope import Scope

# The way out for a model with trainable parameters in 16 bits. Since version 5 of transformers the dtype of the
# checkpoint is the default.
FP32_PARAMETERS = (
    "Load the model in FP32, one of transformers by from_pretrained(..., dtype=torch.float32), or call model.float() "
    "before the optimizer is built: graphs cast FP32 parameters themselves. Or freeze them with requires_grad_(False)."
)

_ARE_LOW, _REFUSED = "trainable parameter(s) are low", "in train mode, with gradients, they are refused"

_reading: ContextVar[bool] = ContextVar("reading", default=False)


@contextlib.contextmanager
def only_read() -> Iterator[None]:
    """Inside this context models are captured to read their decisions, and not to be trained."""
    token = _reading.set(True)
    try:
        yield
    finally:
        _reading.reset(token)


def is_only_read() -> bool:
    """Say whether a model is captured to read its decisions, and not to run."""
    return _reading.get()


def low_parameters(named: Iterable[tuple[str, Any]]) -> list[tuple[str, torch.dtype]]:
    """Return the names and dtypes of trainable parameters in FP16 or BF16, among parameters and other values."""
    return [(n, p.dtype) for n, p in named if isinstance(p, nn.Parameter) and p.requires_grad and p.dtype in LOW_DTYPES]


def noted_low(notes: Iterable[str]) -> str:
    """Return the trainable parameters that the notes of a plan say are low, as they are listed there; "" for none."""
    found = (re.fullmatch(rf"\d+ {re.escape(_ARE_LOW)}: (.*); {_REFUSED}", note) for note in notes)
    return next((match[1] for match in found if match), "")


def require_fp32(named: Iterable[tuple[str, Any]], opening: str = "") -> None:
    """Raise PolicyError where trainable parameters, given by name, are FP16 or BF16; `opening` begins its message."""
    if low := low_parameters(named):
        kind = "FP16" if low[0][1] == torch.float16 else "BF16"
        raise PolicyError(
            f"{opening.format(kind=kind)}{len(low)} trainable parameter(s) are low already: {_listed(low)}. Updates "
            f"below the resolution of 16 bits vanish. {FP32_PARAMETERS}"
        )


def lowered_by_forward(model: nn.Module, low: Collection[str]) -> str:
    """Say which parameters the forward of a model makes low itself, and where it does, as far as its code shows it."""
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in low}
    lines = dict.fromkeys(line for owner in owners.values() for line in _assignments(type(owner)))
    where = f" ({', '.join(lines)})" if lines else ""
    kept = ", ".join(f"'{name}'" for name in list(low)[:3])
    return (
        f"forward of {type(model).__name__} itself puts low values into {len(low)} trainable parameter(s){where}, "
        f"which are in 16 bits from then on, under torch.autocast too: {kept}. Updates below the resolution of 16 bits "
        "vanish; parameter.data.copy_(value) keeps a parameter's dtype."
    )


def _assignments(kind: type) -> Iterator[str]:
    for code in (getattr(function, "__code__", None) for function in vars(kind).values()):
        line = 0
        for step in () if code is None else dis.get_instructions(code):
            line = step.starts_line if isinstance(step.starts_line, int) and step.starts_line > 1 else line
            if code is not None and step.opname == "STORE_ATTR" and step.argval == "data":
                yield f"{code.co_filename}:{line}"


def refuse_low_parameters(
    named: Collection[tuple[str, Any]], training: bool, gathered: Callable[[], bool] = lambda: False,
    lowered: Collection[str] = (),
) -> tuple[str, ...]:  # fmt: skip
    """Raise PolicyError where low parameters are trained, but for those `lowered`; else return notes for the plan."""
    low = [(name, dtype) for name, dtype in low_parameters(named) if name not in lowered]
    if not low:
        return ()
    listed = _listed(low)
    if not training or not torch.is_grad_enabled() or is_only_read():
        return (f"{len(low)} {_ARE_LOW}: {listed}; {_REFUSED}",)
    if gathered():
        return (f"FSDP2 gathers {len(low)} trainable parameter(s) in a low dtype, which need no cast: {listed}",)
    require_fp32([(name, p) for name, p in named if name not in lowered])
    return ()


def _listed(low: Sequence[tuple[str, torch.dtype]]) -> str:
    first = ", ".join(f"'{name}' ({str(dtype).removeprefix('torch.')})" for name, dtype in low[:3])
    return first + (f" and {len(low) - 3} more" if low[3:] else "")


def opaque_parameters(named: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    """Return a note for the plan that lists the weights of a tensor subclass; none for shards, which are plain."""
    # Dynamo and the exporter take such a tensor apart by `__tensor_flatten__`.
    wrappers = [(n, p) for n, p in named if isinstance(p, nn.Parameter) and hasattr(p, "__tensor_flatten__")]
    found = [(n, type(p).__name__) for n, p in wrappers if not is_spread(p)]
    listed = ", ".join(f"'{n}' ({kind})" for n, kind in found[:3])
    return (f"{len(found)} weight(s) are opaque, read as under autocast: {listed}",) if found else ()


def of_eight_bits(found: Scope | None, policy: Policy) -> tuple[str, ...]:
    """Return a note for the plan that lists the modules which compute in 8 bits; none where nothing is rounded."""
    modules = {} if found is None or not policy.level.rounds else eight_bit_modules(found.root)
    if not modules:
        return ()
    return (
        f"keep: {listed(modules)} read autocast's state and round by themselves: their ops keep their dtypes, and "
        "values are not autocast's there",
    )
