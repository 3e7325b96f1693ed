"""The compiler: a captured graph in, a mixed-precision graph and its plan out. `compile_graph` is its one entrance.

Imports torch and networkx, never fxamp. What users may name of it, `fxamp` gives on.
"""

from __future__ import annotations

from .pipeline import compile_graph as compile_graph

__all__ = ["compile_graph"]
