"""Build and repack wheels: toolchains, environments, NCCL, vLLM, and upstream's wheels with fixes."""
