"""FlashInfer: its releases, and its fixes in the order of ``recipe.toml``."""
