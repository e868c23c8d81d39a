"""What every program of the store needs besides its work: children, logs, an orderly end."""
