"""The gate: a model's plan now, against the plan that is committed and against budgets, in the formats of CI.

Imports the record, the difference and `convert`.
The command and the pytest plugin use it.
"""
