"""Check how containers are started: what RDMA and many threads need from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from patchkit.finding import Finding, Level
from patchkit.runtime.files.content import Assignment, ContainerOptions, FileContent

_RDMA = "/dev/infiniband"
_STARTS = ("vllm serve", "ray start")
_DOCKER = "Docker's reference; ibv_reg_mr(3)"


def check_containers(content: FileContent) -> Iterator[Finding]:
    """Return what a container of vLLM lacks; nothing of one whose options are not all known."""
    for each in content.containers:
        started = [
            command
            for command in content.commands
            if command.program in _STARTS and each.block in content.blocks(command)
        ]
        if not started or not each.is_whole:
            continue
        if each.program == "podman" and not each.has("--pids-limit"):
            yield _lacks(
                each,
                "--pids-limit=-1",
                "2048 processes and threads at most: podman's default",
                "vLLM, Ray and NCCL start more: `can't start new thread`.",
                "podman-run(1)",
            )
        if _means_rdma(each, content.environment(started[0])):
            yield from _for_rdma(each)


def _means_rdma(options: ContainerOptions, environment: Mapping[str, Assignment]) -> bool:
    """Return whether NCCL is to use RDMA in it, as far as its own lines say so."""
    off = environment.get("NCCL_IB_DISABLE")
    if off and off.value != "0":
        return False
    adapters, net = environment.get("NCCL_IB_HCA"), environment.get("NCCL_NET")
    wanted = bool(adapters and adapters.is_given) or bool(net and net.value == "IB")
    return wanted or options.has("--device", _RDMA)


def _for_rdma(each: ContainerOptions) -> Iterator[Finding]:
    privileged = any(
        name == "--privileged" and value.lower() not in ("false", "no")
        for name, value in each.options
    )
    mounted = any(each.has(name, _RDMA) for name in ("-v", "--volume", "--mount"))
    if not (privileged or mounted or each.has("--device", _RDMA)):
        yield _lacks(
            each,
            f"--device={_RDMA}",
            "RDMA is meant, and the container has no RDMA device",
            "NCCL finds no adapter there, and goes over sockets or ends.",
            _DOCKER,
        )
    may_lock = any(each.has("--cap-add", name) for name in ("IPC_LOCK", "ALL", "all"))
    if not (privileged or may_lock or each.has("--ulimit", "memlock")):
        yield _lacks(
            each,
            "--ulimit=memlock=-1",
            "RDMA is meant, and nothing says how much memory it may lock",
            "NCCL registers its buffers: beyond the limit that ends with `Cannot allocate memory`.",
            _DOCKER,
        )
    if not any(each.has(name, "host") for name in ("--network", "--net")):
        yield _lacks(
            each,
            "--network=host",
            "RDMA is meant, and the container has a network of its own",
            "RoCE's GIDs are of the host's interfaces, and the ranks' ports are not published.",
            _DOCKER,
        )


def _lacks(each: ContainerOptions, option: str, what: str, why: str, source: str) -> Finding:
    said = _IN_COMPOSE.get(option, option) if each.program == "compose" else option
    return Finding(
        line=each.line,
        level=Level.WARNING,
        what=what,
        why=why,
        hint=f"add {said}",
        source=source,
    )


_IN_COMPOSE = {
    f"--device={_RDMA}": f"devices: [{_RDMA}]",
    "--ulimit=memlock=-1": "ulimits: {memlock: -1}",
    "--network=host": "network_mode: host",
}
