"""Compiled loops of the client."""
