"""Finished wheels: what is in them, and the folder that holds them."""
