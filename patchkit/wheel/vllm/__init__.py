"""Make wheels of vLLM: built from sources, or upstream's with the fixes put in."""
