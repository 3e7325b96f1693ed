"""The API reference, which is made of docstrings: what every public name says, and that its examples run as printed."""

from __future__ import annotations

import ast
import doctest
import functools
import inspect
import pickle
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fxamp

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
TENSORS = re.compile(r"Tensor\b|\bBatch\b")
INPUTS = {"args", "kwargs", "inputs", "target"}  # of a model, whatever their annotation says


def members() -> Iterator[tuple[str, Any]]:
    """Yield every public name, and every public function and property of those that are classes."""
    for name in fxamp.__all__:
        value = getattr(fxamp, name)
        yield name, value
        if isinstance(value, type):
            own = {k: v for k, v in vars(value).items() if not k.startswith("_") or k == "__call__"}
            yield from ((f"{name}.{k}", v) for k, v in own.items() if inspect.isroutine(v) or is_property(v))


def is_property(value: object) -> bool:
    return isinstance(value, property | functools.cached_property)


def function_of(value: Any) -> Any:
    """Return the function behind a method, a class or what a context manager was made of; None where there is none."""
    if is_property(value):
        return None
    found = vars(value).get("__init__") if isinstance(value, type) else getattr(value, "__func__", value)
    function = found and inspect.unwrap(found)
    return function if function and function.__code__.co_filename != "<string>" else None  # which a dataclass makes


MEMBERS = dict(members())
FUNCTIONS = {name: function for name, value in MEMBERS.items() if (function := function_of(value)) is not None}


def doc(name: str) -> str:
    return inspect.getdoc(MEMBERS[name]) or ""


def examples(name: str) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(doc(name), name)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Return what the examples begin with: the lines that the package's own docstring shows."""
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for example in doctest.DocTestParser().get_examples(fxamp.__doc__ or "", "fxamp"):
        exec(example.source, found)
    return found


@pytest.mark.parametrize("name", [n for n in MEMBERS if examples(n)])
def test_examples_run_as_printed(
    name: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    test = doctest.DocTest(examples(name), dict(names), name, None, None, doc(name))
    told: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=told.append)
    assert not told, "".join(told)


def test_public_names_are_shown_as_users_write_them() -> None:
    assert dir(fxamp) == sorted(fxamp.__all__)
    for name in fxamp.__all__:
        if isinstance(value := getattr(fxamp, name), type):
            assert f"{value.__module__}.{value.__qualname__}" == f"fxamp.{name}"
            assert pickle.loads(pickle.dumps(value)) is value


def test_every_public_name_has_an_example() -> None:
    named = [n for n, v in MEMBERS.items() if not is_property(v) and not n.endswith("__call__")]
    assert [n for n in named if not examples(n)] == []


def test_every_property_stands_in_an_example_of_its_class() -> None:
    for name in (n for n, v in MEMBERS.items() if is_property(v)):
        owner, _, attribute = name.partition(".")
        shown = "".join(e.source for n in MEMBERS if n.partition(".")[0] == owner for e in examples(n))
        assert re.search(rf"\.{attribute}\b", shown), name


def test_docstrings_of_functions_on_tensors_give_shapes() -> None:
    for name, function in FUNCTIONS.items():
        signature = inspect.signature(function)
        annotated = [str(p.annotation) for p in signature.parameters.values()] + [str(signature.return_annotation)]
        if INPUTS & signature.parameters.keys() or any(map(TENSORS.search, annotated)):
            assert re.search(r"\bshapes?\b|\bone element\b", doc(name)), name


def test_docstrings_name_the_errors_that_are_raised() -> None:
    for name, function in FUNCTIONS.items():
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        raised = {ast.unparse(n.exc).partition("(")[0] for n in ast.walk(tree) if isinstance(n, ast.Raise) and n.exc}
        said = doc(name).partition("Raises:")[2]
        unsaid = [e for e in raised if e.endswith("Error") and not re.search(rf"^ +{e}: ", said, re.MULTILINE)]
        assert unsaid == [], name


def test_names_of_arguments_are_followed_by_a_sentence() -> None:
    for name in MEMBERS:
        if described := re.search(r"^Args:\n((?:[ \t]+.*\n|\n)+)", doc(name) + "\n", re.MULTILINE):
            for line in re.findall(r"^    \S.*$", described[1], re.MULTILINE):
                assert re.match(r"    \**\w+: [A-Z\"'`0-9]", line), f"{name}: {line.strip()}"
