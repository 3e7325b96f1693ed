"""What a model runs and how exact it is: a census, errors, ranges and overflows, and which policy to take.

Imports nothing itself; its folders import `convert`, and what is seen of a run.
The training step, reports and the command use them.
"""
