"""Fast forms of the parts of a model."""
