"""mooncake_store."""
