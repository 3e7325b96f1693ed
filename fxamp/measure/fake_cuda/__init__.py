"""Counting for a GPU that is not there: Inductor schedules a step for an H100 on torch's CPU build, and nothing runs.

Imports what reads Inductor's graphs, and nothing that converts or trains: whoever counts names what is to run.
The gate and the report on compiled steps use it. It always runs in a process of its own, in which CUDA is there.
"""
