"""Compiled loops of simulated machines."""
