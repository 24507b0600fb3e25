"""Look at what containers get on a node: GPUs, RDMA devices, room; and what an image is for.

Read are `docker info` and `podman info`, `image inspect`, and the specifications of the Container
Device Interface (CDI) that `nvidia-ctk cdi generate` writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from patchkit.cluster.agent.health import DiskRoom, disk_rooms
from patchkit.process import run

_SECONDS = 30.0
_FOLDERS = ("/etc/cdi", "/var/run/cdi")  # what the last one has counts: CDI, pkg/cdi/doc.go
_GPU = re.compile(r'\bkind"?: *"?nvidia\.com/gpu\b')
_ALL = re.compile(r'\bname"?: *"?all\b')
_DRIVER = re.compile(r"/libcuda\.so\.(\d+\.[\d.]*\d)")
_CUDA = ("CUDA_VERSION", "NV_CUDA_LIB_VERSION", "NVIDIA_REQUIRE_CUDA")  # of nvidia/cuda, NGC


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What containers get: ``spec`` is the CDI specification with all GPUs, "" for none.

    ``driver`` is the one whose libraries it names, ``hook`` whether docker has NVIDIA's for --gpus.
    ``storage`` is where images are, ``closed`` are files of RDMA devices that this user may open as
    a member of a group at most. ``cpu`` and ``cuda`` ("13.0") are what the image is for, "" for
    none.
    """

    version: str
    storage: tuple[DiskRoom, ...]
    spec: str = ""
    driver: str = ""
    hook: bool = False
    closed: tuple[str, ...] = ()
    cpu: str = ""
    cuda: str = ""


def look_at_engine(program: str, image: str, root: str = "/") -> EngineFacts:
    """Return what containers of an engine get, and what the image of this id is for, if any.

    Raises HostError if the engine does not answer.
    """
    said = json.loads(run(program, "info", "--format", "{{json .}}", timeout=_SECONDS).output)
    if "host" in said:  # podman, which may be called docker
        version, storage, folders = (
            said["version"]["Version"],
            said["store"]["graphRoot"],
            [*_FOLDERS],
        )
    else:
        version, storage = said["ServerVersion"], said["DockerRootDir"]
        folders = said.get("CDISpecDirs") or []
    spec, driver = "", ""
    for file in (each for folder in folders for each in sorted(Path(root + folder).glob("*"))):
        with contextlib.suppress(OSError):
            text = file.read_text(encoding="utf-8", errors="replace")
            if file.suffix in (".yaml", ".json") and _GPU.search(text) and _ALL.search(text):
                found = _DRIVER.search(text)
                spec, driver = f"/{file.relative_to(root)}", found[1] if found else ""
    hook = "nvidia" in said.get("Runtimes", ()) or shutil.which("nvidia-container-runtime-hook")
    verbs = ((file, file.stat()) for file in sorted(Path(root, "dev/infiniband").glob("uverbs*")))
    closed = [
        str(file) for file, its in verbs if its.st_mode & 6 != 6 and its.st_uid != os.getuid()
    ]
    cpu, cuda = "", ""
    if image:
        shown = run(program, "image", "inspect", "--", image, timeout=_SECONDS).output
        (its,) = json.loads(shown)
        variables = dict(pair.partition("=")[::2] for pair in its["Config"].get("Env") or ())
        versions = (re.search(r"\d+\.\d+", variables.get(name, "")) for name in _CUDA)
        cpu, cuda = its["Architecture"], next((found[0] for found in versions if found), "")
    return EngineFacts(
        version=version,
        storage=tuple(disk_rooms([storage])),
        spec=spec,
        driver=driver,
        hook=bool(hook),
        closed=tuple(closed),
        cpu=cpu,
        cuda=cuda,
    )
