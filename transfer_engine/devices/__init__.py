"""Memory of accelerators as the near end of transfers."""
