"""What the benches are made of."""
