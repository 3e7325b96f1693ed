"""The training step: loss scaling, gradient accumulation and the order of things round a model.

Imports its own rooms, and what converted and compiled modules are.
Users call it; reports describe it.
"""
