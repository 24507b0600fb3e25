"""Measure and compare, tune, and write images from what is planned."""
