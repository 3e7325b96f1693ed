"""The differences between two plans, two converted modules, or two graphs, node by node.

Imports what reads plans and graphs, the record and its forms.
The command and the gate use it.
"""
