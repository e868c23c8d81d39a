"""Compiled loops of the allocators."""
