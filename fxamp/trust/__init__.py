"""Checks on the example inputs: the captured graph computes what the model does, and the converted module runs.

Imports the converted module and the user's model.
Capture, `convert` and measuring use it.
"""
