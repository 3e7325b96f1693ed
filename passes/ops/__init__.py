"""The knowledge about each op: its one name in every dialect, its rule, and facts measured on a device.

Imports the contract and the runtime.
Every analysis and every pass uses it.
"""
