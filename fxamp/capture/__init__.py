"""From `nn.Module` to flat FX graphs, ahead of time; the model is as it was afterwards.

Imports the compiler's analyses and what a converted module is called like; `convert` and the checks use it.
"""
