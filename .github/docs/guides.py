"""Guides.

.. include:: training.md
.. include:: trainers.md
.. include:: ranks.md
.. include:: checking.md
.. include:: capture.md
.. include:: moving.md
.. include:: glossary.md
"""
