"""The shard core: everything a master does to its state, as a pure state machine over columns.

Where to begin: `shard` has every operation, `records` says what a row is, `state` holds the columns
and the one way out of them. Then the operation at hand: `puts`, `reads`, `removal`, `renames`,
`tasks`. `space` knows the segments, `pressure` makes room in them, `janitor` does what is due and
`repair` what is missing. `_kernels_*` are the loops of all these; `context` leads them to the
columns.
"""
