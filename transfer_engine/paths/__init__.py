"""Several ways to one segment: which is used, what rests, what is tried again."""
