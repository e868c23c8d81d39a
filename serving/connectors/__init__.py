"""Connectors of inference engines to the store, and what they share."""
