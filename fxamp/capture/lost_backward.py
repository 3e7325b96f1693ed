"""Derivatives that Dynamo loses: of an author's Function inside of a derivative of `torch.func`.

There Dynamo traces the Function's `forward` as if it were plain code, and what is computed is the derivative of that,
not its `backward` or `jvp`.

Before: torch.func.grad(lambda t: (Round.apply(t) * t).sum())(h)
After:  grad_increment_nesting(); t.round() * t; ...; grad_decrement_nesting()      round has no gradient
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import CodeType

import torch
from torch.fx import GraphModule

from passes.contract.errors import CaptureError

from .._torch import codes_in_trace

_DERIVES = ("_grad_increment_nesting", "_jvp_increment_nesting")
_ENDS = ("_grad_decrement_nesting", "_jvp_decrement_nesting")
_LINE = re.compile(r'File "(.*)", line (\d+), in forward$', re.MULTILINE)


class LostDerivativeError(CaptureError):
    """A graph that Dynamo has just captured has lost the derivative of a Function."""


def refuse_lost_derivatives(gm: GraphModule) -> None:
    """Raise LostDerivativeError where a graph that is being captured has the inside of a Function in a derivative."""
    inside = 0
    lines: dict[tuple[str, int], CodeType] | None = None
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "")
        inside += (name in _DERIVES) - (name in _ENDS)
        if not inside or not node.op.startswith("call"):
            continue
        if lines is None:
            lines = {line: code for code in {*codes_in_trace()} & {*_forwards()} for line in _lines(code)}
        for file, line in _LINE.findall(node.meta.get("stack_trace") or "") if lines else ():
            if (code := lines.get((file, int(line)))) is not None:
                raise LostDerivativeError(
                    f"inside of a derivative of torch.func it loses that of {getattr(code, 'co_qualname', 'forward')} "
                    f"({code.co_filename}:{code.co_firstlineno})"
                )


def _forwards(kind: type[torch.autograd.Function] = torch.autograd.Function) -> Iterator[CodeType]:
    each: type[torch.autograd.Function]
    for each in kind.__subclasses__():
        if (code := getattr(vars(each).get("forward"), "__func__", None)) is not None:
            yield code.__code__
        yield from _forwards(each)


def _lines(code: CodeType) -> Iterator[tuple[str, int]]:
    return ((code.co_filename, line) for _, _, line in code.co_lines() if line is not None)
