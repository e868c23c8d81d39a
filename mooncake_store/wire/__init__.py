"""What clients, workers and masters say to each other: the operations of the store's services."""
