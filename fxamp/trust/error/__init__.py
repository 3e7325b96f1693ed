"""The error of a colouring: predicted before training, measured against float64, and kept under a budget.

Imports `convert`, the views, the watch over graphs, and the compiler's contract.
The command uses it, and whoever calls fxamp.estimate_error, fxamp.verify and fxamp.tune. Nothing here decides a colour
by itself: `tune` prices errors, and the minimum cut of the compiler decides.
"""
