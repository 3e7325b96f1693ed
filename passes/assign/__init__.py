"""Pass 2: decide in which dtype every node runs, and say why. The graph is not changed.

Imports its two halves: `colour`, what each node runs in, and `place`, where values are stored.
The pipeline runs it; `casts` carries out what it decided.
"""
