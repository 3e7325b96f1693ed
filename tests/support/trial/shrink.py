"""From a program that fails to a smaller one that fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from .grammar import INPUTS
from .program import Line, Program

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, *, tries: int = 400) -> Program:
    """Return a program that still fails, and that no single step makes smaller.

    A step leaves out a line, where what it made is read from then on as one of what it read; puts the inside of a
    block in its place; returns less; evaluates instead of training; or replaces a line by the first thing it read.
    """
    seen: set[str] = set()
    going = True
    while going:
        going = False
        for smaller in steps(program):
            text = smaller.text()
            if text in seen or tries <= 0:
                continue
            seen.add(text)
            tries -= 1
            if fails(smaller):
                program, going = smaller, True
                break
    return program


def steps(program: Program) -> Iterator[Program]:
    """Yield what is one step smaller, large steps first."""
    names = re.findall(r"\bv\d+[abc]?\b|\b(?:" + "|".join(INPUTS) + r")\b", program.output)
    if program.output.strip() not in names:
        for name in dict.fromkeys(names):
            yield replace(program, output=name)
    for i in reversed(range(len(program.lines))):
        line = program.lines[i]
        before, after = program.lines[:i], program.lines[i + 1 :]
        for instead in ("", *_reads(line)):
            if not instead and line.makes and _used(line.makes, after, program.output):
                continue
            rename = {line.makes: instead} if instead and line.makes else {}
            yield replace(
                program, lines=(*before, *(_renamed(a, rename) for a in after)), output=_named(program.output, rename)
            )
        if line.body:
            yield replace(program, lines=(*before, *line.body, *after))
            for j in range(len(line.body)):
                if len(line.body) > 1:
                    body = (*line.body[:j], *line.body[j + 1 :])
                    yield replace(program, lines=(*before, replace(line, body=body), *after))
    if program.training:
        yield replace(program, training=False)
    if program.inputs_require_grad:
        yield replace(program, inputs_require_grad=False)


def _reads(line: Line) -> list[str]:
    found = re.findall(r"\bv\d+[abc]?\b|(?<![.\w'])(?:" + "|".join(INPUTS) + r")\b", line.text)
    return list(dict.fromkeys(found)) if line.makes else []


def _used(name: str, lines: tuple[Line, ...], output: str) -> bool:
    text = "\n".join([*(t for line in lines for t in line.rendered()), output])
    return re.search(rf"\b{name}\b", text) is not None


def _renamed(line: Line, names: dict[str, str]) -> Line:
    return Line(line.makes, _named(line.text, names), tuple(_renamed(b, names) for b in line.body))


def _named(text: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        text = re.sub(rf"\b{old}\b", new, text)
    return text
