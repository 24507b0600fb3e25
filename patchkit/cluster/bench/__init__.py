"""Measure how fast a model is served, and compare the results."""
