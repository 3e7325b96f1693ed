"""The converted view of a model: how it is called, copied and saved, and the graphs that it runs.

Imports the compiler and what Dynamo captures.
`convert` makes views; reports, the training step and the checks read them.
"""
