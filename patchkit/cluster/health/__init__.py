"""Collect on a node what tells of its health: limits, the log of the kernel, GPU, tools, caches."""
