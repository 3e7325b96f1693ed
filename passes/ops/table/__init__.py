"""The rows: what is known of each op, by kind of op. All that is known of one stands in one place.

Imports nothing; `row` says what the columns mean.
`rules` joins the files; a new op is one more name, or one more `of`, in the group that it belongs to.
"""
