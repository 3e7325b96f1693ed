"""The range of values and gradients: where one overflows, and what to run in FP32 for that.

Imports a step under observation, and the watch. The training step uses it after many skipped steps.
"""
