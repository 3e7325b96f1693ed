"""The training step: loss scaling, gradient accumulation, and the calls around the model in the right order.

Imports its own folders, views, compiled modules and the census.
Users call it; reports describe it.
"""
