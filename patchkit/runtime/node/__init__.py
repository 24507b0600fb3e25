"""Decide what a node is in its cluster: from its facts, the options and its head's env file."""
