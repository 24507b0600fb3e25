"""Repack released wheels: patched, under a version of their own."""
