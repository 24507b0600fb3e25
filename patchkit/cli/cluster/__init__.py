"""Verbs for several machines: launch, watch, stop, and the models on them."""
