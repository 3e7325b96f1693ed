"""What Dynamo captures, described for the compiler; and graphs that the user brings.

Imports the compiler, what is seen of a run, and, for torch's structured trace, the record of a report.
Views, `convert`, measuring, reports and the training step use it.
"""
