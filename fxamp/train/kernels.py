"""What Inductor made of the graphs of a compiled function, in counts: of those that its last call ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports Inductor, which takes seconds
    from ..measure.inductor import Counts, Graph


@dataclass
class _Compiled:
    """A graph that was compiled, and its backward, which Inductor compiles when that first runs."""

    graphs: list[Graph] = field(default_factory=list)

    @property
    def lacks_backward(self) -> bool:
        kinds = [graph.kind for graph in self.graphs]
        return "forward" in kinds and "backward" not in kinds


class Kernels:
    """Knows what Inductor has recorded of each graph of a function, and which of them its last call ran.

    Args:
        records: Whether Inductor compiles, with the options of `fxamp.measure.inductor.recording`.
    """

    def __init__(self, records: bool) -> None:
        self._records = records
        self._ran: list[_Compiled] = []
        self._mark: Any = None  # of what was recorded before the graph, or the backward, that is being compiled

    def compile(self, compile_graph: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """Compile a graph; what is returned notes that it runs."""
        self._set_mark()
        run, compiled = compile_graph(), _Compiled()
        compiled.graphs += self._new()

        def noted(*args: Any) -> Any:
            self._ran.append(compiled)
            return run(*args)

        return noted

    def begin(self) -> None:
        """Forget what ran: a call begins."""
        self._ran.clear()

    def after_forward(self) -> None:
        """Get ready for a backward that is compiled while it runs."""
        if any(compiled.lacks_backward for compiled in self._ran):
            self._set_mark()

    def after_backward(self) -> None:
        """Note what was compiled in backward, which runs the graphs of the last call in reverse."""
        lacking = [compiled for compiled in reversed(self._ran) if compiled.lacks_backward]
        if lacking:
            for compiled, graph in zip(lacking, self._new(), strict=False):
                compiled.graphs.append(graph)

    @property
    def ran(self) -> bool:
        """Whether the last call ran a graph."""
        return bool(self._ran)

    @property
    def counts(self) -> Counts | None:
        """The sum over the graphs of the last call; None if there is no record of one, or of its backward."""
        from ..measure.inductor import Counts

        if any(not compiled.graphs or compiled.lacks_backward for compiled in self._ran):
            return None
        return sum((graph.counts for compiled in self._ran for graph in compiled.graphs), Counts())

    def _set_mark(self) -> None:
        if self._records:
            from ..measure.inductor import recorded

            self._mark = recorded()

    def _new(self) -> list[Graph]:
        if not self._records:
            return []
        from ..measure.inductor import recorded_since

        return recorded_since(self._mark)
