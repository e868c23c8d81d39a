"""Who leads, who stands by, and where: what processes on several hosts must agree on.

Where to begin: `base` says what a coordinator can do, `etcd` does it with an etcd, by way of
`gateway`, `leases` says until when something is surely held, `election` makes leaders of them.
`directory` is for those who only look up where a pool is. See docs/internals/coordination.md.
"""
