"""Say how an image is built and run; nothing is run here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from patchkit.measure.image.containerfile import image_facts

_NAME = "vllm-wheelhouse"


def build_lines(platform: str, file: Path) -> Iterator[tuple[str, ...]]:
    """Yield the command of each builder, for the folder that holds the wheelhouse.

    Times of files are those of 1970, so that the same wheelhouse makes the same layers.
    """
    named = ("--platform", platform, "--file", str(file), "--tag", _NAME)
    output = "type=docker,rewrite-timestamp=true"
    epoch = ("--build-arg", "SOURCE_DATE_EPOCH=0")
    yield ("docker", "buildx", "build", *named, *epoch, "--output", output, ".")
    yield ("podman", "build", *named, "--timestamp", "0", ".")
    yield ("buildah", "build", *named, "--timestamp", "0", ".")


def run_lines() -> Iterator[tuple[str, ...]]:
    """Yield the words that run it on a node with RoCE, by docker and by podman.

    The server listens on this machine alone. RDMA needs the host's network, the devices and locked
    memory without a limit; podman allows 2048 processes, and threads count. The env file is that of
    this node, in docker's format.
    """
    home = f"/home/{image_facts().user}"
    node = (
        *("--network", "host", "--ipc", "host", "--device", "/dev/infiniband"),
        *("--ulimit", "memlock=-1", "--pids-limit", "-1", "--env-file", "node.env"),
        *("--volume", "/srv/models:/srv/models:ro", "--volume", f"vllm-cache:{home}/.cache"),
        *(_NAME, "serve", "/srv/models/MODEL", "--host", "127.0.0.1"),
    )
    yield ("docker", "run", "--rm", "--gpus", "all", *node)
    yield ("podman", "run", "--rm", "--device", "nvidia.com/gpu=all", *node)
