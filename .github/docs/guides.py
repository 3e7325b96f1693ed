"""Guides.

.. include:: training.md
.. include:: trainers.md
.. include:: ranks.md
.. include:: checking.md
.. include:: capture.md
.. include:: glossary.md
"""
