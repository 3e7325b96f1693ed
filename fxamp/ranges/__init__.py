"""The range of values and gradients: where one overflows, and what to run in FP32 for that.

Imports the views, the watch and the census's way to see graphs. The training step uses it after many skipped steps.
"""
