"""Read a Python environment without importing from it: packages, and which libnccl it loads."""
