"""The record: what was decided for every node and what it costs, as data that other programs read.

Imports plans, converted modules and checks.
Every form of a report is made from it.
"""
