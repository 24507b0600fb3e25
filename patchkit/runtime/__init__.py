"""Serve the machine that runs vLLM; nothing of patching and of wheels is needed."""
