"""The record: what was decided for every node and what it costs, as data that other programs read.

Imports plans, graphs, and what leaves a model as it was.
Every form of a report is made from it.
"""
