"""Plan what each node's memory will hold when it serves a model."""
