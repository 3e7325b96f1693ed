"""From `nn.Module` to flat FX graphs, ahead of time. The model is left unchanged.

Imports the compiler's analyses, the converted module's tree, and the checks that a capture must pass.
`convert` uses it.
"""
