"""What is seen of a run, and how all is left as it was: ops that ran, the tensors that a model holds, random states.

Imports the compiler's contract and its table of ops.
Capture, views, measuring, diagnostics, records and the training step use it.
"""
