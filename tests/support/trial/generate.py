"""From a seed to a random program that runs, plain and under `torch.autocast`, forward and backward."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import re
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .grammar import BATCH, BLOCKS, DTYPES, EXPRESSIONS, INPUTS, OUTPUTS, PARTS, STATEMENTS, WEIGHTS, WIDTH
from .program import Line, Program, environment
from .runs import tensors

LARGEST = 1e3  # a value that FP16 holds with room to spare
LINES = (3, 14)
WRITES, HOLDS = 0.15, 0.08  # how often a line writes, or holds others


class Stock(nn.Module):
    """All that `self` can have."""

    def __init__(self) -> None:
        super().__init__()
        for text in PARTS.values():
            exec(text, environment() | {"self": self})  # constants of the grammar


class Writer:
    """Writes a program line by line, and runs each line, plain and under autocast, to see that it fits."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.training = self.draw.random() < 0.5
        stocks = [Stock().train(self.training) for _ in range(2)]
        stocks[1].load_state_dict(stocks[0].state_dict())
        stocks[1].table = copy.deepcopy(stocks[0].table)
        values = {name: eval(text, environment()) for name, text in INPUTS.items()}
        self.scopes: list[dict[str, Any]] = [environment() | {"self": s} for s in stocks]
        for scope in self.scopes:
            scope |= {name: v.clone() for name, v in values.items()}
        self.names = [n for n in INPUTS if n in "xyz" or self.draw.random() < 0.5]
        self.count = 0

    def program(self, seed: int) -> Program:
        """Write one."""
        wanted, lines = self.draw.randint(*LINES), list[Line]()
        for _ in range(20 * wanted):
            line = self.line()
            if line is not None and self.fits(line):
                lines.append(line)
                self.count += 1
            if len(lines) == wanted:
                break
        outputs = [self.filled(self.draw.choice(OUTPUTS)) for _ in range(20)]
        output = next((o for o in outputs if o is not None and self.fits(Line("out", o))), "x")
        return Program(tuple(lines), output, self.training, self.draw.random() < 0.2, seed)

    def line(self, *, inside: bool = False) -> Line | None:
        """Return a line, or None where the values at hand do not fill its holes."""
        kind = self.draw.random()
        if kind < WRITES:
            text = self.filled(self.draw.choice(STATEMENTS))
            return None if text is None else Line("", text)
        if kind < WRITES + HOLDS and not inside:
            head = self.filled(self.draw.choice(BLOCKS))
            body = [self.line(inside=True) for _ in range(self.draw.randint(1, 3))]
            held = tuple(Line(b.makes and f"{b.makes}{'abc'[i]}", b.text) for i, b in enumerate(body) if b is not None)
            return Line("", head, held) if head is not None and held else None
        group = self.draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        text = self.filled(self.draw.choice(EXPRESSIONS[group]))
        return None if text is None else Line(f"v{self.count}", text)

    def filled(self, template: str) -> str | None:
        """Return a template with values in its holes."""
        first: Tensor | None = None

        def value(hole: re.Match[str]) -> str:
            nonlocal first
            kind = hole[1]
            if kind == "k":
                return str(self.draw.choice((0.5, 2.0, -1.5, 0.1, 3)))
            if kind == "t":
                return self.draw.choice(DTYPES)
            if kind == "d":
                return str(self.draw.choice((0, 1, -1)))
            found = [n for n in self.names if self.suits(kind, self.scopes[0][n], first)]
            if not found:
                raise LookupError
            recent = found[-4:] if self.draw.random() < 0.7 else found
            name = self.draw.choice(recent)
            first = self.scopes[0][name] if first is None else first
            return name

        try:
            return re.sub(r"\{(\w)\}", value, template).replace("{{", "{").replace("}}", "}")
        except LookupError:
            return None

    def suits(self, kind: str, value: Any, first: Tensor | None) -> bool:
        """Say whether a value may stand in a hole."""
        if not isinstance(value, Tensor) or value.is_complex():
            return False
        if kind == "i":
            return value.dtype is torch.long and value.shape == (BATCH,) and bool((value >= 0).all())
        if kind == "b":
            return value.dtype is torch.bool
        if not value.is_floating_point():
            return False
        if kind == "s":
            return first is None or value.shape == first.shape
        shaped = {"m": value.shape == (BATCH, WIDTH), "c": value.dim() == 3, "w": value.shape[-1:] == (WIDTH,)}
        return shaped.get(kind, True) and value.numel() > 0

    def fits(self, line: Line) -> bool:
        """Run a line in both scopes; keep what it makes where it runs, and is of a size that FP16 holds."""
        text = "\n".join(line.rendered())
        if line.body and not all(self.alone(inner) for inner in line.body):
            return False
        random_state = torch.get_rng_state()
        for scope, on in zip(self.scopes, (False, True), strict=True):
            torch.set_rng_state(random_state)
            try:
                with torch.autocast("cpu", torch.bfloat16, enabled=on), contextlib.redirect_stderr(io.StringIO()):
                    exec(text, scope)  # lines of the grammar
            except Exception:
                return False
        made = [n for n in sorted(line.names) if n in self.scopes[0] and n in self.scopes[1]]
        for name in made:
            value = self.scopes[0][name]
            if isinstance(value, Tensor) and value.is_floating_point():
                both = [self.scopes[i][name].detach().double() for i in range(2)]
                if not all(v.isfinite().all() and (v.abs() <= LARGEST).all() for v in both) or value.numel() > 500:
                    return False
            if isinstance(value, Tensor) and name != "out":
                self.names.append(name)
        return True

    def alone(self, line: Line) -> bool:
        """Say whether a line inside another may stand there: what it reads is known."""
        return all(m in self.names for m in re.findall(r"\bv\d+[abc]?\b", line.text))


def generate(seed: int) -> Program | None:
    """Return the program of a seed; None where what came out does not run as a whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = Writer(seed).program(seed)
        return program if runs(program) else None


def runs(program: Program) -> bool:
    """Say whether a program runs, plain and under autocast, and gives finite values that FP16 holds."""
    for low in (None, torch.bfloat16, torch.float16):
        try:
            model, args = program.build()
            with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
                output = model(*args)
            floats = [t for t in tensors(output) if t.is_floating_point()]
            if not floats or not all(t.isfinite().all() and (t.abs() <= LARGEST).all() for t in floats):
                return False
        except Exception:  # in a read of what it gave, too: a view may be forbidden by then
            return False
    return True
