"""The fixes of NCCL, one a file, each with one FIX."""
