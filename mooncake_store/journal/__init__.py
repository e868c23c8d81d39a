"""A shard's journal on its host: memory with a name, the files behind it, and a thread between.

Where to begin: `ring_file` is the memory that outlives a process, `row_file` a word for each row
beside it, `layout` says what files consist of, `writer` copies one to the other, `reading` puts
both together again, `ending` says how a run ended. See docs/internals/journal.md.
"""
