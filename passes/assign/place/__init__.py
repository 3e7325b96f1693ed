"""Where values are stored that may be in either dtype: so that the fewest bytes move, by a minimum cut.

Imports the colours, which it leaves as they are but for those of free values.
`assign` runs it.
"""
