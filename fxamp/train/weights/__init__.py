"""Weights that are cast once a window: which ones, how their casts are kept, and what that saves.

Imports views, ranks and measuring.
The window and the training step use it, and the demo counts by it.
"""
