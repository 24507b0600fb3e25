"""The platform that the plugin names."""

from vllm.platforms.cpu import CpuPlatform


class EmulatedSparkPlatform(CpuPlatform):
    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "emulated_spark.communicator.TcpCommunicator"
