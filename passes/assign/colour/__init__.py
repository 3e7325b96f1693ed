"""The colour of each node, the dtype that it runs in, and why: one simulation forwards over the graph, each rule read as the level reads it.

Imports analyses, ops and the contract.
`assign` runs it, and `place` asks it.
"""
