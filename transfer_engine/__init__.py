"""transfer_engine."""
