"""The calls of a model that is compiled in place: one that does not run its plan says so.

`model.compile()` and `torch.compile(model)` put what torch has made in the place of a call, and nothing of fxamp is
called where Dynamo runs no graph. So the first graph of a model puts `Calls` around that:

    dispatch modes        Dynamo would leave the code to Python for good, so it is not asked: only this call is lost
    recompile limit       is in Dynamo's records of what it has compiled
    whatever else         a call in which no graph has run
    deepcopy, pickle      torch leaves out of a copy what `compile` has put into the model
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from passes._torch import FakeTensor, in_transform
from passes.contract.devices import DEVICES

from .._torch import (
    at_recompile_limit,
    dispatch_modes,
    dynamo_is_disabled,
    dynamo_stance,
    ignores_compilers,
    last_record,
    wrap_compiled_call,
)
from .call import graphs_run
from .graphs import COMPILED, Graphs
from .scope import Scope

COPIES_A_MODEL = "fxamp"  # marks the table of a deepcopy that fxamp makes of a model
_VIEW = "a view, which fxamp.compile returns, runs its plan there"
_OF_COPIES = "_fxamp_copies"  # the attribute of a model with what is called when it is copied


def compiled_in_place(inputs: Sequence[Any], scope: Scope | None) -> Graphs:
    """Return the store for a graph: of the compiled module, else, where a function was compiled, of a parameter."""
    parameters = (v for v in inputs if isinstance(v, nn.Parameter) and not isinstance(v, FakeTensor))
    key = scope.root if scope is not None else next(parameters, None)
    graphs: Graphs = Graphs() if key is None else COMPILED.setdefault(key, Graphs())
    if scope is not None and scope.called is not None:
        name = type(scope.root).__name__
        wrap_compiled_call(
            scope.called, lambda run, plain: run if isinstance(run, _Calls) else _Calls(run, plain, name, graphs)
        )
        if scope.called is scope.root:
            vars(scope.root)[_OF_COPIES] = _Copies(name, graphs)
    return graphs


def why_no_graph() -> str:
    """Return what keeps Dynamo away from a call; "" if nothing that is known does."""
    stance = dynamo_stance()
    if stance != "default":
        return f"torch.compiler.set_stance({stance!r})"
    if dynamo_is_disabled():
        return "torch._dynamo.config.disable"
    return "a transform of torch.func, under which Dynamo cannot trace" if in_transform() else ""


class _Calls:
    """What is called in the place of a model: what torch has compiled; `plain` is the model as it is written."""

    def __init__(self, compiled: Callable[..., Any], plain: Callable[..., Any], name: str, graphs: Graphs) -> None:
        self._compiled, self._plain, self._name, self._graphs = compiled, plain, name, graphs
        self._limit = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        modes = [mode for mode in dispatch_modes() if not (ignores_compilers(mode) or mode.is_infra_mode())]
        if modes:
            mode = type(modes[-1]).__name__.lstrip("_")
            self._say(f"{mode}, a dispatch mode, is on, under which torch.compile runs nothing; {_VIEW}")
            return self._plain(*args, **kwargs)
        ran, last = graphs_run(), last_record()
        outputs = self._compiled(*args, **kwargs)
        if not self._limit and last_record() is not last and (codes := at_recompile_limit(last)):
            self._limit = (
                f"{codes[-1]} has reached Dynamo's recompile limit, which torch._dynamo.config.recompile_limit sets; "
                f"{_VIEW}"
            )
            self._say(self._limit)
        elif graphs_run() == ran and not torch.compiler.is_exporting():
            self._say(why_no_graph() or self._limit or "Dynamo left it to Python (TORCH_LOGS=graph_breaks says why)")
        return outputs

    def _say(self, cause: str) -> None:
        instead = "under autocast" if any(map(torch.is_autocast_enabled, DEVICES)) else "as written"
        text = f"{self._name}: a call did not run its plan, but {instead}: {cause}"
        self._graphs.note(text)
        self._graphs.say(cause, logging.WARNING, text)


class _Copies:
    """Says that a copy of a model, by deepcopy or pickle, is not compiled."""

    def __init__(self, name: str, graphs: Graphs) -> None:
        self._name, self._graphs = name, graphs

    def __deepcopy__(self, memo: dict[Any, Any]) -> None:
        if COPIES_A_MODEL not in memo:
            self._say()

    def __reduce__(self) -> Any:
        self._say()
        return type(None), ()

    def _say(self) -> None:
        self._graphs.say(
            "copy", logging.WARNING, f"a copy of {self._name} has no plan, since torch leaves out of copies what "
            "compile() has put into a model: compile the copy too",
        )  # fmt: skip
