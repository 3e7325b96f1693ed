"""The loss scale: what it may be set to, how it follows overflows, and what became of its updates.

Imports the contract alone.
The training step uses it, and users do without one.
"""
