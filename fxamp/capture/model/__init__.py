"""The author's model: how it is called, what it reads and holds, what no graph would keep. It is never changed.

Imports the contract and analyses, and nothing else of fxamp.
Capture uses it, and so do the converted module and the checks.
"""
