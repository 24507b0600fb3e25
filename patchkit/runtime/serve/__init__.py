"""Decide the flags of `vllm serve` for a node, a model and a release."""
