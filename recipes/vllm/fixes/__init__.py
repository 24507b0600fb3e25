"""The fixes of vLLM, one a file, each with one FIX."""
