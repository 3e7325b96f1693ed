"""Counting and timing: casts and bytes of a step, single ops, whole passes, what Inductor makes; costs kept on disk.

Imports views, and what leaves a model as it was.
`convert` uses it for `cost="measured"`, the training step, the gate and the demo for their counts.
"""
