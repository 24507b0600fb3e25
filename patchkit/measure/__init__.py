"""Measure and compare, and write images from what is planned."""
