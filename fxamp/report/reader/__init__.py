"""What is reported: the plan, the graphs and the record of a model that fxamp converted, of a plan, or of a saved plan.

Imports what converts models, and views. All that prints decisions uses it.
"""
