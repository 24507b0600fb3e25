"""patchkit: version-aware source patches for vLLM, NCCL and FlashInfer on the DGX Spark GB10."""

__version__ = "0.1.0"
