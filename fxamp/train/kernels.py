"""What Inductor made of the graphs of a compiled function, in counts: of those that its last call ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports Inductor, which takes seconds
    from ..measure.inductor import Counts, Graph


class Kernels:
    """What Inductor has recorded, if it `records`, of the graphs that the last call of a function `ran`."""

    def __init__(self, records: bool) -> None:
        self._records = records
        self.ran: list[list[Graph]] = []
        self._mark: Any = None  # of what was recorded before the graph, or the backward, that is being compiled

    def compile(self, compile_graph: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """Compile a graph; what is returned notes that it runs."""
        self._set_mark()
        run, records = compile_graph(), self._new()

        def noted(*args: Any) -> Any:
            self.ran.append(records)
            return run(*args)

        return noted

    def after_forward(self) -> None:
        """Get ready for a backward that is compiled while it runs."""
        if any(map(_lacks_backward, self.ran)):
            self._set_mark()

    def after_backward(self) -> None:
        """Note what was compiled in backward, which runs the graphs of the last call in reverse."""
        if lacking := list(filter(_lacks_backward, reversed(self.ran))):
            for records, graph in zip(lacking, self._new(), strict=False):
                records.append(graph)

    @property
    def counts(self) -> Counts | None:
        """The sum over the graphs of the last call; None if there is no record of any, or of the backward of one.

        A graph without a record beside others has no kernels: it is what a break has left of a function.
        """
        from ..measure.inductor import Counts

        if (self.ran and not any(self.ran)) or any(map(_lacks_backward, self.ran)):
            return None
        return sum((graph.counts for records in self.ran for graph in records), Counts())

    @property
    def stored(self) -> list[tuple[int, Mapping[str, Any]]]:
        """What the backward graphs of the last call read that was stored as no dtype of theirs says.

        Each has the place of its graph among those of the call.
        """
        backward = ((at, g) for at, records in enumerate(self.ran) for g in records if g.kind == "backward")
        return [(at, each) for at, graph in backward for each in graph.stored]

    def _set_mark(self) -> None:
        if self._records:
            from ..measure.inductor import recorded

            self._mark = recorded()

    def _new(self) -> list[Graph]:
        if not self._records:
            return []
        from ..measure.inductor import recorded_since

        return [*recorded_since(self._mark)]


def _lacks_backward(records: Sequence[Graph]) -> bool:
    kinds = [graph.kind for graph in records]
    return "forward" in kinds and "backward" not in kinds
