"""From `nn.Module` to flat FX graphs, ahead of time; the model is as it was afterwards.

Imports the compiler's analyses, the converted module's tree, and the checks that a capture must pass.
`convert` uses it.
"""
