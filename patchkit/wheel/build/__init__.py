"""Run compilers: toolchain, work folder, log and progress; build libnccl."""
