"""Leaves a model as it was while it is run, and compares two runs of it.

Imports the compiler's contract and its table of ops.
Capture, views, measuring, records and the training step use it.
"""
