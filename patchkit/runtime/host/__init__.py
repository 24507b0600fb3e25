"""Read the facts of one machine: firmware, GPUs, interfaces, RDMA devices, software."""
