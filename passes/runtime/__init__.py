"""Functions that converted graphs call by name: saved modules hold these paths, so nothing here is ever renamed.

Imports only torch, by way of `_torch`.
Capture and the third pass write these calls, and `ops` knows them.
"""
