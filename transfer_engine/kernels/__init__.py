"""Compiled loops of the data path."""
