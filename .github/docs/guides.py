"""Guides.

.. include:: training.md
.. include:: trainers.md
.. include:: checking.md
.. include:: capture.md
"""
