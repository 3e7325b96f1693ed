"""What each node runs in, and why: one simulation forwards over the graph, each rule read as the level reads it.

Imports analyses, ops and the contract.
`assign` runs it, `place` asks it, and `verify` computes dtypes by it.
"""
