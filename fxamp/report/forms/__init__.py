"""A record in other forms: a tree of modules, the costliest lines, Model Explorer.

Imports the record, and what makes text harmless.
Reports, differences and the gate use it.
"""
