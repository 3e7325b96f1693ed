"""The interface of the compiler: its input (a policy), its output (a plan, with reasons), and its errors.

The levels and the devices are rows here: a new device is one row in `devices.py`.

Imports nothing else of ours.
Everyone uses it; `fxamp` re-exports its public names.
"""
