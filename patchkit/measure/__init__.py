"""Measure and compare, tune, and write images and manifests from what is planned."""
