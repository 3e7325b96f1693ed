"""Position casts: of the values that may have either dtype, choose which to store low, so that the fewest bytes move.

That is a minimum cut.

Imports the colours; it changes only those of free values.
`assign` runs it.
"""
