"""The compiler: a captured graph in, a mixed-precision graph and its plan out. `compile_graph` is the only entry point.

It takes an `Origin` of every node from the front end that captured the graph. `Pipeline` is the order of the passes,
each a `Pass` over a `Unit`; `watched` lets a `Watcher` observe them, and `NAMES` are their names. `ByteCosts` are
its cost model.
Imports torch and networkx, never fxamp; `fxamp` re-exports its public names.
"""

from __future__ import annotations

from .assign.place.costs import ByteCosts
from .form import Pass, Unit
from .graph.notes import Origin
from .pipeline import NAMES, Pipeline, Watcher, compile_graph, watched

__all__ = [
    "NAMES", "ByteCosts", "Origin", "Pass", "Pipeline", "Unit", "Watcher", "compile_graph",
    "watched",
]  # fmt: skip
