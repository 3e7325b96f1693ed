"""The op table, one file for each kind of op. Everything that is known about an op is in one row.

Facts measured in each low dtype are in `../facts_<device>.json`; `passes/assign/colour/decide.py` interprets both for
each level.

Imports the contract; `row` says what the columns mean.
`rules` joins the files; a new op is one more name, or one more `of`, in the group that it belongs to.
"""
