"""Let the ranks of one group talk over TCP, and not through shared memory."""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class TcpCommunicator(CpuCommunicator):
    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False
