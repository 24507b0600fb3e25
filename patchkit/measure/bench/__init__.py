"""Measure servers with vLLM's own benchmark, in turns; say what a difference is worth."""
