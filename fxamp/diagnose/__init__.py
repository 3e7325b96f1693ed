"""A step with its loss and its batches, converted and run under observers; what all diagnostics are given, in one way.

Imports `convert`, what Dynamo captures, and what is seen of a run.
The census, errors, ranges and searches lie on top; the training step replays a window by it.
"""
