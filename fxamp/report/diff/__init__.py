"""The differences between two plans, two converted modules, or two graphs, node by node.

Imports plans, converted modules and what `torch.compile` made.
Reports and the gate use it.
"""
