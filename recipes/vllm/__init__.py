"""The recipe of vLLM: its releases, its fixes, and the modules that only they need."""
