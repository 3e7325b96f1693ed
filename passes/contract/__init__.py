"""What the compiler is asked (a policy), what it answers (a plan, with reasons), and what may go wrong.

Imports nothing else of ours.
Everyone uses it; `fxamp` gives its public names on.
"""
