"""The page: one HTML file that needs no other file. Python writes the record into it, and its script draws it.

Imports the record and its forms; a report uses it.
"""

from .page import page as page
