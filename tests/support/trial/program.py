"""A random program as data, and as the Python that it is."""

from __future__ import annotations

import itertools
import linecache
import random
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .grammar import INPUTS, PARTS
from .untraced import called, deep, generated, outside, turn

_FRACTION = re.compile(r"(?<![\w.\[])\d+(?:\.\d+)?e-\d+|(?<![\w.\[])\d+\.\d+")


class Pair(NamedTuple):
    """An output with names."""

    first: Any
    second: Any


@dataclass(frozen=True)
class Line:
    """A line of `forward`: what it makes (a name, or "" for one that writes), its text, and the lines inside it."""

    makes: str
    text: str
    body: tuple[Line, ...] = ()

    def rendered(self, indent: str = "") -> Iterator[str]:
        """Yield the lines of Python."""
        yield indent + (f"{self.makes} = {self.text}" if self.makes else self.text)
        for line in self.body:
            yield from line.rendered(indent + "    ")

    @property
    def names(self) -> set[str]:
        """The names that it and the lines inside it make."""
        return {self.makes} - {""} | {n for line in self.body for n in line.names}


@dataclass(frozen=True)
class Program:
    """A model and its inputs.

    Attributes:
        lines: of `forward`.
        output: what it returns.
        training: the mode that it is run in.
        inputs_require_grad: of the inputs that can.
        seed: of parameters and inputs.
        attributes: its fractions are attributes of the model, and not written into the lines.
    """

    lines: tuple[Line, ...]
    output: str
    training: bool = False
    inputs_require_grad: bool = False
    seed: int = 0
    attributes: bool = False
    serial: int = field(default_factory=itertools.count().__next__, compare=False)

    @property
    def parts(self) -> list[str]:
        """The names of what `self` needs to have, in order."""
        text, wanted = self._body(), set[str]()
        while found := {n for n in PARTS if re.search(rf"self\.{n}\b", text)} - wanted:
            wanted |= found
            text += "\n".join(PARTS[n] for n in found)
        return [n for n in PARTS if n in wanted]

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs that it reads; the first one, where it reads none."""
        body = self._body()
        return [n for n in INPUTS if re.search(rf"(?<![.\w']){n}\b", body)] or ["x"]

    def _body(self) -> str:
        return "\n".join([*self.rendered_lines(), self.output])

    def rendered_lines(self) -> list[str]:
        """Return the lines of `forward` before its last."""
        return [text for line in self.lines for text in line.rendered()]

    def source(self) -> str:
        """Return the class as Python."""
        made = [f"        {PARTS[n]}" for n in self.parts]
        body = [f"        {text}" for text in self.rendered_lines()]
        if self.attributes:
            made += [f"        self.{name} = {number}" for name, number in self.numbers.items()]
            named = itertools.count()
            body = [_FRACTION.sub(lambda _: f"self.number{next(named)}", text) for text in body]
        return "\n".join([
            "class Program(nn.Module):", "    def __init__(self):", "        super().__init__()", *made, "",
            f"    def forward(self, {', '.join(self.inputs)}):", *body, f"        return {self.output}", "",
        ])  # fmt: skip

    @property
    def numbers(self) -> dict[str, float]:
        """The fractions in its lines, by the names that they have as attributes."""
        found = _FRACTION.findall("\n".join(self.rendered_lines()))
        return {f"number{i}": float(text) for i, text in enumerate(found)}

    def text(self) -> str:
        """Return all that reproduces it: class, inputs and mode."""
        made = "\n".join(f"{n} = {INPUTS[n]}" for n in self.inputs)
        grad = ", inputs that require gradients" if self.inputs_require_grad else ""
        return f"{self.source()}\n# {'training' if self.training else 'evaluation'}{grad}; seed {self.seed}\n{made}\n"

    def build(self) -> tuple[nn.Module, tuple[Any, ...]]:
        """Return the model and its inputs."""
        module, text = types.ModuleType(f"program_{self.seed}_{self.serial}"), self.source()
        name, scope = f"{module.__name__}.py", module.__dict__
        sys.modules[module.__name__] = module  # where Dynamo looks for what a function names
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        scope |= environment()
        exec(compile(text, name, "exec"), scope)  # what this file is for
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        model: nn.Module = scope["Program"]()
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() == 1 and p.dtype is torch.float32:
                    p.add_(torch.randn_like(p) * 0.1)  # gains of one and biases of nought would hide what they do
        args = tuple(eval(INPUTS[n], scope) for n in self.inputs)  # constants of the grammar
        if self.inputs_require_grad:
            args = tuple(a.requires_grad_() if a.is_floating_point() else a for a in args)
        return model.train(self.training), args


def environment() -> dict[str, Any]:
    """Return the names that a program uses."""
    beside = {f.__name__: f for f in (called, deep, generated, outside, turn)}
    return {"torch": torch, "nn": nn, "F": F, "Tensor": Tensor, "checkpoint": checkpoint, "Pair": Pair, **beside}
