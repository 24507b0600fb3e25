"""Look closer at a node, from the node: limits, logs of the kernel, disks, GPU, tools, caches."""
