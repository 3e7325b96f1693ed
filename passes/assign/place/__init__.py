"""Where casts go: which values that may have either dtype are stored low, so that the fewest bytes move.

That is a minimum cut.

Imports the colours; it changes only those of free values.
`assign` runs it.
"""
