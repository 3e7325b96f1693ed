"""Pass 1: bring a captured graph into the form the rules speak of; its values do not change.

Imports ops and analyses.
The pipeline runs it.
"""
