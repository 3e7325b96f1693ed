"""Pass 1: bring a captured graph into the form that the rules are written for; its values do not change.

Imports ops, analyses, and what emitted graphs call.
The pipeline runs it.
"""
