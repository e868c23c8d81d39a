"""Compiled loops of the policies."""
