"""vLLM: its releases, its fixes in the order of ``recipe.toml``, and what only they need."""
