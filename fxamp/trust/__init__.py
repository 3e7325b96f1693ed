"""Is it the same model: the captured graph against the original, and the converted module, on the example inputs.

Imports the converted module and the author's model.
Capture, `convert` and measuring use it.
"""
