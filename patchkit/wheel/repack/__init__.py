"""Patch upstream's vLLM wheel without a compiler."""
