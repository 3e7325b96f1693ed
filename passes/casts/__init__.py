"""Passes 3 and 4, and verification: insert casts, drop and share them, check invariants after every pass.

Nothing is decided here; `assign` decides.

Imports analyses, and the knowledge of which operands a kernel rejects.
The pipeline runs it.
"""
