"""The fixes of FlashInfer, one a file, their texts in fixes.toml."""
