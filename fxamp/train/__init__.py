"""The training step: loss scaling, gradient accumulation, and the calls around the model in the right order.

Imports its own folders, and what converted and compiled modules are.
Users call it; reports describe it.
"""
