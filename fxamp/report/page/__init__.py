"""The page: one HTML file that needs no other file; Python draws it, and a small script handles the keys.

`render` and the templates are independent of the content, so that other pages can use them too.

Imports the record and its forms; a report uses it.
"""

from .report import page as page
