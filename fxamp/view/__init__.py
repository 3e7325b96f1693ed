"""The converted view of a model: how it is called, checked, copied and saved, and the graphs that it runs.

Imports the compiler, what Dynamo captures, and what is seen of a run.
`convert` makes views; reports, measuring and the training step read them.
"""
