"""Random programs with something in them that Dynamo cannot trace, and leaves to Python or begins a graph behind."""

from __future__ import annotations

import random
from dataclasses import replace

from .program import Line, Program

# By kind: the line that comes in front of a line of the program.
STATEMENTS = {
    "break": Line("", "torch._dynamo.graph_break()"),
    "print": Line("", "print(end=str(x.shape)[:0])"),
    "item": Line("", "if float(x.sum()) > 1e9:", (Line("", "raise ValueError(x.shape)"),)),
    "early exit": Line("", "if outside(lambda: turn() % 3 == 1):", (Line("", "return x"),)),
    "guards": Line("", "if getattr(self, 'turn', '') == 'never':", (Line("", "return x"),)),
}
# By kind: what computes the value of a line.
EXPRESSIONS = {
    "disabled": "outside(lambda: {})", "generator": "next(generated(lambda: {}))", "recursion": "deep(lambda: {}, 300)",
    "called by C": "called(lambda: {})",
}  # fmt: skip
KINDS = (*STATEMENTS, *EXPRESSIONS)


def interrupted(program: Program, seed: int) -> tuple[Program, str]:
    """Return a program with an interruption at a random place, drawn by a seed, and the kind of it."""
    draw = random.Random(seed)
    places = [i for i, line in enumerate(program.lines) if line.makes and not line.body]
    kind = draw.choice(KINDS if places else tuple(STATEMENTS))
    lines = list(program.lines)
    if kind in STATEMENTS:
        lines.insert(draw.randint(0, len(lines)), STATEMENTS[kind])
    else:
        at = draw.choice(places)
        lines[at] = replace(lines[at], text=EXPRESSIONS[kind].replace("{}", lines[at].text))
    return replace(program, lines=tuple(lines)), kind
