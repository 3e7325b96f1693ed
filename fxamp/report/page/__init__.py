"""The page: one HTML file that needs no other file; Python draws it, and a small script handles the keys.

`render` and the templates know nothing of what they show, so that other pages can be made of them too.

Imports the record and its forms; a report uses it.
"""

from .report import page as page
