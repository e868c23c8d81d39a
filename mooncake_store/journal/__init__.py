"""A shard's journal on its host: memory with a name, the files behind it, and a thread between.

Where to begin: `ring_file` is the memory that outlives a process, `layout` says what files consist
of, `writer` copies one to the other, `reading` puts both together again. See
docs/internals/journal.md.
"""
