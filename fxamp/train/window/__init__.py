"""One window of micro-batches: from the loss of each to the update, or the skipped step, at the end.

Imports the loss scale, the weights and the ranks.
The training step uses it, uncompiled or compiled.
"""
