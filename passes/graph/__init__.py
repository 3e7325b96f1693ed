"""Analyses of a graph: what its values are, share and hold, and which patterns it has.

Nothing here changes a graph, but `splice`, by which capture and the first pass put one into another.

Imports what is known of ops, and the contract.
Every pass uses it, and capture does.
"""
