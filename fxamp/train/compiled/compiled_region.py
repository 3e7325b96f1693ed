"""A function that `torch.compile` compiles for a training step, with counts of graphs, breaks and fallbacks."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from passes._torch import compile_records

from ...capture.compiled import break_of
from .compile_settings import CompileSettings


class Region:
    """A compiled function.

    Attributes:
        name: What it computes.
        settings: What compiles it.
        frames: How many pieces of code were compiled, each into a graph for one form of the inputs.
        breaks: Where and why a graph ended early.
        recompiles: Why code was compiled once more.
        fallbacks: What runs uncompiled, and why.
        uncaptured: Why there is no CUDA graph of something.
        failed: Whether the backend itself raised an error in the last call.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        settings: CompileSettings,
        backend: Callable[[GraphModule, list[Any]], Callable[..., Any]] | None = None,
        **given: Any,
    ) -> None:
        """Compile nothing yet.

        Args:
            name: What the function computes.
            function: A plain function, without a closure.
            settings: What compiles it.
            backend: What compiles each graph, given with its inputs; that of the settings by default.
            given: Options of `torch.compile`, which replace those in the settings.
        """
        self.name = name
        self.settings = settings
        self.frames = 0
        self.breaks: list[str] = []
        self.recompiles: list[str] = []
        self.fallbacks: list[str] = []
        self.uncaptured: list[str] = []
        self.failed = False
        self._backend = backend or settings.run()
        # Dynamo keeps what it compiles by code object: two steps would compete for one limit of recompiles.
        own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        how = {"dynamic": settings.dynamic, "fullgraph": settings.fullgraph, **given}

        def compiler(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            return self._compile(gm, example_inputs)

        compiler.__name__ = settings.name  # the name by which torch calls the backend in errors
        self._run = torch.compile(own, backend=compiler, **how)

    def __call__(self, *args: Any) -> Any:
        """Run the function; compile it first if it is not compiled yet.

        Raises:
            Exception: An error of the function, or of compiling it; the latter gets a note with the way out.
        """
        before = compile_records()
        self.failed = False
        try:
            return self._run(*args)
        except Exception as error:
            if self.failed:
                _add_note(error, self._said(str(error)))
            raise
        finally:
            self._look_back(before)

    def _compile(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if reason := break_of(gm):
            self.breaks.append(reason)
        try:
            run: Callable[..., Any] = self._backend(gm, example_inputs)
        except Exception:
            self.failed = True
            raise
        return run

    def _said(self, error: str) -> str:
        way_out = "Try compile='aot_eager' to see whether the graph is at fault, or compile=False to train uncompiled."
        if "C++ compiler" in error:
            way_out = "Install a C++ compiler; or use compile='aot_eager', which compiles no kernels, or compile=False."
        return f"The backend '{self.settings.name}' failed on the graph '{self.name}' of this TrainStep. {way_out}"

    def _look_back(self, before: list[Any]) -> None:
        """Read from Dynamo's records what it has compiled, or failed to compile, during the last call."""
        after = compile_records()
        if not after or (before and after[-1] is before[-1]):
            return
        known = set(map(id, before))
        for record in after:
            if id(record) in known:
                continue
            self.frames += bool(record.has_guarded_code and record.graph_op_count)
            if record.recompile_reason:
                self.recompiles.append(record.recompile_reason)
            if record.fail_reason and not self.failed:
                self.fallbacks.append(f"{record.co_name}: {record.fail_reason.splitlines()[0]}")
            if reason := getattr(record, "cudagraph_skip_reason", None):  # not in every torch
                self.uncaptured.append(reason)


def _add_note(error: Exception, note: str) -> None:
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(note)
