"""Passes 3 and 4, and the proof: insert casts, drop and share them, verify what must hold after every pass.

Nothing is decided here: that is `assign`.

Imports analyses, and what operands a kernel refuses.
The pipeline runs it.
"""
