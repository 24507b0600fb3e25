"""The fixes of NCCL, one a file, their texts in fixes.toml."""
