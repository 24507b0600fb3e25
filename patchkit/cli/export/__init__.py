"""Verbs of `patchkit export`: a manifest for Kubernetes, a job for Ray."""
