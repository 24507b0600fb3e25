"""Decide which environment variables a node gets, and write its env file."""
