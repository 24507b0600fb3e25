"""The fixes of vLLM, one a file, their texts in fixes.toml."""
