"""Analyses of a graph: its values, the storage that they share, the numbers in it, and patterns of ops.

Nothing here changes a graph.

Imports what is known of ops, and the contract.
Every pass uses it, and capture does.
"""
