"""Verbs for the machine that runs vLLM."""
