"""The operator set and its backends."""
