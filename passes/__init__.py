"""The compiler: a captured graph in, a mixed-precision graph and its plan out. `compile_graph` is the only entry point.

It takes an `Origin` of every node from the front end that captured the graph. `Pipeline` is the order of the passes,
each a `Pass` over a `Unit`; `watched` lets a `Watcher` observe them, and `NAMES` are their names. `ByteCosts` are
its cost model.
Imports torch and networkx, never fxamp; `fxamp` re-exports its public names.
"""

from __future__ import annotations

from .assign.place.costs import ByteCosts as ByteCosts
from .form import Pass as Pass
from .form import Unit as Unit
from .graph.notes import Origin as Origin
from .pipeline import NAMES as NAMES
from .pipeline import Pipeline as Pipeline
from .pipeline import Watcher as Watcher
from .pipeline import compile_graph as compile_graph
from .pipeline import watched as watched

__all__ = [
    "NAMES", "ByteCosts", "Origin", "Pass", "Pipeline", "Unit", "Watcher", "compile_graph",
    "watched",
]  # fmt: skip
