"""Which colouring to take: the smallest part in FP32 that a metric needs, and one table for the question what to do.

Imports what measures errors, ranges and times, and the training step. Nothing here decides by itself.
"""
