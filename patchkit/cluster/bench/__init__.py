"""Measure how fast a model is served, and compare what was measured."""
