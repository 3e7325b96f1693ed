"""Where casts go: which values that may have either dtype are stored low, so that the fewest bytes move.

That is a minimum cut.

Imports the colours, which it leaves as they are but for those of free values.
`assign` runs it.
"""
