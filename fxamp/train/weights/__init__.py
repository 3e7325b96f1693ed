"""Weights that are cast once a window: which ones, how their casts are kept, and what that saves.

Imports the converted module, and measuring.
The training step uses it, and the demo counts by it.
"""
