"""Traces of requests: read and checked, described, made up, changed, recorded.

A trace is a file of JSON lines, one a request in the order of their times: `timestamp` (ms),
`input_length` and `output_length` (tokens), and `hash_ids`, the names of its prompt's blocks of 512
tokens, where equal names mean equal prefixes.
"""
