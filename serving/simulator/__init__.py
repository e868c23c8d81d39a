"""A serving cluster in simulated time: the product's own decisions over a model of machines."""
