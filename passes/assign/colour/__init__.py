"""The colour of each node, which is the dtype that it runs in, and why.

One simulation goes forwards over the graph, and reads each rule as the level reads it.

Imports analyses, ops and the contract.
`assign` runs it, and `place` asks it.
"""
