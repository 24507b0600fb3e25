"""Try GPUs step by step, with the Python that has vLLM: each node's own, then all together."""
