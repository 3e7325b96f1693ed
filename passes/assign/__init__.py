"""Pass 2: decide in which dtype every node runs, and say why. The graph is not changed.

Imports its two halves: `colour` decides the dtype that each node runs in, and `place` the dtype that values are stored
in. The pipeline runs it; `casts` carries out what it decided.
"""
