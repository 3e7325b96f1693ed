"""The parts of a training step that `torch.compile` compiles: model and loss in one graph, the update in another.

Imports the window, the weights and the torch.compile side.
The training step uses it.
"""
