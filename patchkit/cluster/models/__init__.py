"""Fetch, check, copy and remove models: one folder each, pinned to its commit."""
