"""The training step: loss scaling, gradient accumulation, and the calls around the model in the right order.

Imports views, what Dynamo captures, the census and what finds overflows.
Users call it; reports describe it.
"""
