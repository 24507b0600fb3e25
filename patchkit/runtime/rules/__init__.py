"""Read the rules about variables and flags of vLLM and NCCL, and which release has which names."""
