"""Decide the environment of a node from its facts, its role and the file of its head."""
