"""One window of micro-batches: from the loss of each to the update at the end, or to none.

Imports the loss scale.
The training step uses it, as Python or in compiled parts.
"""
