"""Leading shards of a pool on another host than its master's: a program, and how it finds that."""
