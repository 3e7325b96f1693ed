"""A record in other forms: a tree of modules, the costliest lines, Model Explorer; and text made harmless.

Imports only the record.
Reports, differences and the gate use it.
"""
