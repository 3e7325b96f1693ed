"""What is known of each op: its one name in every dialect, its rule, and what was measured of it on a device.

Imports the contract and the runtime.
Every analysis and every pass asks it.
"""
