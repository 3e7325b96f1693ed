"""The user's model, which is never changed: how it is called, what it reads and holds, and what a graph would lose.

Imports the contract and analyses, and nothing else of fxamp.
Capture uses it, and so do the converted module and the checks.
"""
