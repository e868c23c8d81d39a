"""What looks after a pool: its jobs, namespaces and troubles, and the HTTP API that tells them.

The commands of `mooncake` ask the same questions by the same steps.
"""
