"""The training step: loss scaling, gradient accumulation and the order of things round a model."""
