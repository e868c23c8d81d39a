"""alloc."""
