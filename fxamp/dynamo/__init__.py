"""The same compiler behind `torch.compile`, at the first call.

Imports the compiler, the user's model, and the checks; and, for torch's structured trace, the record of a report.
`convert` and the training step use it.
"""
