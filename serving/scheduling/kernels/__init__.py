"""Compiled loops of decisions."""
