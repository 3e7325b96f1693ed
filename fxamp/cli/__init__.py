"""The command `fxamp`.

Imports all of fxamp, each part when it is asked for.
`python -m fxamp` and the console script run it.
"""
