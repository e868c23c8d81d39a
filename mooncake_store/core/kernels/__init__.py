"""Compiled loops of the shard core."""
