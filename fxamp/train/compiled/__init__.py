"""The parts of a training step that `torch.compile` compiles: model and loss in one graph, the update in another.

Imports the window, the weights, views, and what Dynamo captures.
The training step uses it.
"""
