"""What emitted graphs call by name: saved modules hold these paths, so nothing here is ever renamed.

Imports torch alone.
Capture writes these calls, and `ops` knows them.
"""
