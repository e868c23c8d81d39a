"""Schedules requests to where their KV blocks are: prefill, decode, and the front of both."""

__all__: list[str] = []
