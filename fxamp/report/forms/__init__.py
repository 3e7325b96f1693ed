"""A record in the forms of others: a tree of modules, Graphviz, Model Explorer; text made harmless where it is shown.

Imports only the record.
Reports, differences and the gate use it.
"""
