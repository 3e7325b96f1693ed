"""Decisions as people and CI read them: the record, the table, the difference, the gate.

Imports the compiler's plans, and what a view and a training step are. The command uses it.
"""
