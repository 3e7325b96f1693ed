"""The loss scale: its settings, how it reacts to overflows, and the history of its updates.

Imports the contract, and what tensors that are spread over ranks need.
The training step uses it, and users who write a loop of their own.
"""
