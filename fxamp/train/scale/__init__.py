"""The loss scale: what it may be set to, how it follows overflows, and what became of its updates.

Imports the contract, and what tensors that are spread over ranks need.
The training step uses it, and users do without one.
"""
