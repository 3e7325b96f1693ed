"""The colour of each node, which is the dtype that it runs in, and why.

One simulation runs forwards over the graph, and applies each rule as the level interprets it.

Imports analyses, ops and the contract.
`assign` runs it, and `place` asks it.
"""
