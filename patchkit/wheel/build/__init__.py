"""Run compilers: toolchains, environments, work folder, log; build libnccl."""
