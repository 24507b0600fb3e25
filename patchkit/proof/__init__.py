"""Prove the effect of a plan with the release's own code, in a sandbox."""
