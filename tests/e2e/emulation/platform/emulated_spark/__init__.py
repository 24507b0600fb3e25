"""A vLLM platform plugin: vLLM's own CPU platform, with two differences.

1. Ray may schedule it. The stock platform names no Ray resource, and vLLM then refuses Ray. This
   one counts as Ray's "GPU", of which `ray start --num-gpus=1` promises one a node, as on a Spark.
2. Ranks talk over gloo, that is TCP. The stock communicator takes shared memory for a
   tensor-parallel group whose ranks agree on its name, and on two machines they agree as well.

So a run proves what vLLM itself does with addresses, interfaces, environment variables, placement
groups, executors and processes: all of that is vLLM's unchanged code. It proves nothing about NCCL,
RDMA, CUDA or speed. GLOO_SOCKET_IFNAME stands where NCCL_SOCKET_IFNAME is with GPUs.
"""


def register() -> str:
    return "emulated_spark.platform.EmulatedSparkPlatform"
