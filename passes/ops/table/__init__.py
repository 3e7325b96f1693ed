"""The rows: what is known of each op, by kind of op. All that is known of one stands in one row.

What was measured of it in each low dtype is in `../facts_<device>.json`; what each level makes of both is in
`passes/assign/colour/levels.py`.

Imports nothing; `row` says what the columns mean.
`rules` joins the files; a new op is one more name, or one more `of`, in the group that it belongs to.
"""
