"""Measure and compare, prove, and write images from what is planned."""
