"""The master: shards that hold the metadata, the cluster service, and who is alive.

Where to begin: `server` starts it all. `shard_service` answers for one shard of
`mooncake_store.core`, with one handler for each operation in `objects`, `contents`, `following` and
`copying`; `cluster` answers for segments and workers; `liveness` knows who is there.
With several shards each is a `shard_process`, watched by `supervisor`.
"""
