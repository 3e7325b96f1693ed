"""A record in other forms: a tree of modules, Graphviz, Model Explorer; and text made harmless where it is shown.

Imports only the record.
Reports, differences and the gate use it.
"""
