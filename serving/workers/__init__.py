"""The worker that prefills or decodes, what it is told, and how others talk to it.

Where to begin: `protocol` is what it is told, `worker` the service that answers, `jobs` and
`decoding` the life of one request, `computing` the thread that owns the engine. KV moves through
`pool_side`, or by `pushing` and `receiving`; `stages` are the parts of a long prompt's pipeline.
"""
