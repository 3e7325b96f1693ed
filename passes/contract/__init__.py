"""What the compiler is asked (a policy), what it answers (a plan, with reasons), and what may go wrong.

The levels and the devices that one may ask for are rows here: a new device is one row in `devices.py`.

Imports nothing else of ours.
Everyone uses it; `fxamp` gives its public names on.
"""
