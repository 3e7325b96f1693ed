"""The error of a colouring: predicted before training, and measured against float64.

Imports a step under observation, and the compiler's contract.
The searches, the command and reports use it. Nothing here decides a colour.
"""
