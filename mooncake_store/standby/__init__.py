"""A second master that holds what a first one wrote down, and leads when it is told to.

`mirror` is the copy of one shard's journal, `following` keeps copies up to date, `service` answers
until the standby is promoted. What it leaves then is a state directory like any other, on which an
ordinary master starts.
"""
