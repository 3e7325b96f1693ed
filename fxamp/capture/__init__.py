"""What Dynamo captures, described for the compiler; and graphs that the user brings.

Imports the compiler, and what is seen of a run.
Views, `convert`, measuring, reports and the training step use it.
"""
