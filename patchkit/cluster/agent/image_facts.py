"""Look at an engine and an image on a node: what containers get, and what is in them. Runs there.

Read are `docker info` or `podman info`, `image inspect`, and the specifications of the Container
Device Interface (CDI) that `nvidia-ctk cdi generate` writes. What is in an image its own Python
says: patchkit is sent into a container as it is sent to a node.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from patchkit.cluster.agent.health import DiskRoom, disk_rooms
from patchkit.cluster.agent.node_files import run_for_user
from patchkit.cluster.ssh.node import Remote
from patchkit.digests import digest
from patchkit.errors import HostError
from patchkit.follow import Completed
from patchkit.foreign import read_json, whole_number
from patchkit.process import ask, attempt
from patchkit.records import matching
from patchkit.runtime.host.host import Software
from patchkit.runtime.host.machine_root import LIVE
from patchkit.runtime.host.software import find_ptxas, read_software

RUN_WORDS = {
    # Its daemon is root's, and not in the unit's control group. The files are those that vLLM
    # raises its own limit to (utils/system_utils.py: set_ulimit), and systemd's hard limit.
    "docker": (
        *(
            "run",
            "--user={user}",
            "--ulimit=memlock=-1",
            "--ulimit=nofile=65535:524288",
        ),
        *("--ulimit=core=0", "--oom-score-adj=100"),
    ),
    # Its root is the user outside, and it has what the unit has: limits and control group. As
    # systemd's manager of groups it would leave that of the unit, and so the unit's journal.
    "podman": (
        *("--cgroup-manager=cgroupfs", "run", "--cgroups=disabled"),
        *("--user=0:0", "--ulimit=host"),
    ),
}
"""By engine: how what runs in a container is the user's, and may do what a rank has to."""

REMOVE_WORDS = {
    "docker": ("rm", "--force"),
    "podman": ("rm", "--force", "--time=0", "--ignore"),
}
"""By engine: how containers end at once."""

LAYER = "io.patchkit.layer"
"""The label of a patched image: what it was patched by, and for what."""

_BY_DIGEST = re.compile("(?:^|sha256:)[0-9a-f]{64}$")  # of names of an image
_ID = re.compile("(?:sha256:)?[0-9a-f]{64}")
# An entry point that is a program by itself; any other is one around what it is given.
_PROGRAM = re.compile(
    r"(?:^|[/ ])(?:vllm|python[\d.]*|(?:ba|da|z)?sh)(?: |$)|vllm\.entrypoints"
)
_PATIENCE = 30.0  # seconds for an engine to answer
_ODD = (OSError, ValueError, LookupError, TypeError, AttributeError)
_FOLDERS = (
    "/etc/cdi",
    "/var/run/cdi",
)  # what the last one has counts: CDI, pkg/cdi/doc.go
_GPU = re.compile(r'\bkind"?: *"?nvidia\.com/gpu\b')
_ALL = re.compile(r'\bname"?: *"?all\b')
_DRIVER = re.compile(r"/libcuda\.so\.(\d+\.[\d.]*\d)")
_CUDA = (
    "CUDA_VERSION",
    "NV_CUDA_LIB_VERSION",
    "NVIDIA_REQUIRE_CUDA",
)  # of nvidia/cuda, NGC
_NOWHERE = DiskRoom(folder="/", free=0, total=0, files=None)
_ASKED = """
import platform, sys
answer = {"release": "%d.%d" % sys.version_info[:2], "machine": platform.machine()}
answer["glibc"] = platform.libc_ver()[1]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageContents:
    """What is in an image, as a container of it says; ``release`` is its Python's, "3.12"."""

    software: Software | None = None
    ptxas: str = ""
    release: Annotated[str, matching(r"(3\.\d{2})?", "a release of Python")] = ""
    machine: Annotated[str, matching("(aarch64|x86_64)?", "a CPU")] = ""
    glibc: Annotated[
        str, matching(r"(2\.(1[7-9]|[2-9]\d))?", "a glibc, 2.17 or later")
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """An engine and an image: ``problem`` is a finding of survey.toml, "" for none.

    ``said`` are the problem's words. ``program`` is the engine, "" for none; ``user`` who runs what
    is inside, whose name is ``login``. ``version`` is "" for an engine that does not answer,
    ``storage`` is where it keeps images. ``spec`` is the CDI specification with all GPUs, "" for
    none, ``driver`` the one whose libraries it names, ``hook`` whether docker has NVIDIA's for
    --gpus. ``infiniband``: devices of RDMA are there; ``closed`` are those that this user may open
    as a member of a group at most.

    ``id`` is "" for an image that is not there; ``content`` is a digest over what an engine calls
    so, which is another in another kind of store. ``wraps``: the entry point runs what it is given.
    ``by_tag``: neither its id nor a digest said that it is the one that was asked for.
    ``digests`` are its names in registries, ``size`` is in bytes, ``owner`` whom it runs as by
    itself, ``layer`` what `apply` made of it. ``cpu`` and ``cuda`` ("13.0") are what it is for.
    """

    program: Annotated[str, matching(r"(/.*/(docker|podman))?", "an engine")] = ""
    user: str = ""
    login: str = ""
    version: str = ""
    storage: DiskRoom = _NOWHERE
    spec: str = ""
    driver: str = ""
    hook: bool = False
    infiniband: bool = False
    closed: tuple[str, ...] = ()
    id: Annotated[str, matching("((sha256:)?[0-9a-f]{64})?", "an id")] = ""
    content: str = ""
    by_tag: bool = False
    wraps: bool = False
    digests: tuple[str, ...] = ()
    size: int = 0
    owner: str = ""
    layer: str = ""
    cpu: str = ""
    cuda: str = ""
    contents: ImageContents = ImageContents()
    problem: str = ""
    said: str = ""

    @property
    def digits(self) -> str:
        """Return the id as all engines take it."""
        return self.id.removeprefix("sha256:")

    @property
    def run(self) -> tuple[str, ...]:
        """Return the words of a container of this image that stand before its own options."""
        words = (
            word.format(user=self.user) for word in RUN_WORDS[Path(self.program).name]
        )
        return (self.program, *words, "--rm", "--pull=never", "--log-driver=none")

    @property
    def remove(self) -> tuple[str, ...]:
        """Return the words before names of containers that end."""
        return (self.program, *REMOVE_WORDS[Path(self.program).name])


def look_at_image(engine: str, names: Sequence[str]) -> ImageFacts:
    """Return what ``find_image`` does, and what the image's own Python finds in it."""
    found = find_image(engine, names)
    if found.problem:
        return found
    # Without a network.
    entry = () if found.wraps else ("--entrypoint=",)
    way = (*found.run, "--interactive", "--network=none", *entry, found.id, "sh", "-c")
    try:
        inside = Remote("the image", way=way).call(ImageContents, contents_inside)
    except HostError as error:
        return replace(found, problem="image-silent", said=error.what)
    return replace(found, contents=inside)


def find_image(engine: str, names: Sequence[str], root: str = "/") -> ImageFacts:
    """Return what a node knows of its engine, and of the image that has the first of these names.

    ``root`` is where the machine's files are.
    """
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/bin:/bin"
    program, user = shutil.which(engine, path=path), pwd.getpwuid(os.getuid())
    if not program:
        return ImageFacts(problem="engine-missing")
    made = ImageFacts(
        program=program, user=f"{user.pw_uid}:{user.pw_gid}", login=user.pw_name
    )
    try:
        # As a unit would: a login may have a group that the user's systemd has not.
        asked = (
            "--pipe",
            "--wait",
            "--collect",
            program,
            "info",
            "--format={{json .}}",
        )
        done = run_for_user("systemd-run", "--quiet", *asked, timeout=_PATIENCE)
        if done.trouble:
            return replace(made, problem="engine-refuses", said=last_line(done))
        said = read_json(done.output)
        if refused := said.get("ServerErrors"):  # docker: no failure with --format
            return replace(made, problem="engine-refuses", said=str(refused[0]))
        if "host" in said and (podman := shutil.which("podman", path=path)):
            made = replace(made, program=podman)  # which some call docker
        made = replace(made, **_read_info(said, root), **_read_devices(root))
        return replace(made, **_inspect_image(made.program, names))
    except _ODD as error:
        odd = f"{engine}: an answer that cannot be read: {error}"
        return replace(made, problem="engine-refuses", said=odd)


def _read_info(said: Any, root: str) -> dict[str, Any]:
    """Return the fields that an engine's `info` and the specifications of CDI give."""
    if "host" in said:
        version, storage = said["version"]["Version"], said["store"]["graphRoot"]
        folders: Sequence[str] = _FOLDERS
    else:
        version, storage = said["ServerVersion"], said["DockerRootDir"]
        folders = said.get("CDISpecDirs") or ()
    spec, driver = "", ""
    for file in (
        each for folder in folders for each in sorted(Path(root + folder).glob("*"))
    ):
        with contextlib.suppress(OSError):
            text = file.read_text(encoding="utf-8", errors="replace")
            if (
                file.suffix in (".yaml", ".json")
                and _GPU.search(text)
                and _ALL.search(text)
            ):
                found = _DRIVER.search(text)
                spec, driver = f"/{file.relative_to(root)}", found[1] if found else ""
    hook = "nvidia" in said.get("Runtimes", ()) or shutil.which(
        "nvidia-container-runtime-hook"
    )
    own = {"version": str(version), "storage": next(disk_rooms([storage]))}
    return {**own, "spec": spec, "driver": driver, "hook": bool(hook)}


def _read_devices(root: str) -> dict[str, Any]:
    folder = Path(root, "dev/infiniband")
    verbs = ((file, file.stat()) for file in sorted(folder.glob("uverbs*")))
    closed = (
        str(file)
        for file, its in verbs
        if its.st_mode & 6 != 6 and its.st_uid != os.getuid()
    )
    return {"infiniband": folder.is_dir(), "closed": tuple(closed)}


def _inspect_image(program: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields that say what an engine knows of an image."""
    for name in names:
        done = attempt(program, "image", "inspect", "--", name, timeout=_PATIENCE)
        if not done.trouble:
            (answer,) = read_json(done.output)
            return {**_image_fields(answer), "by_tag": not _BY_DIGEST.search(name)}
    return {"problem": "image-missing"}


def _image_fields(found: Any) -> dict[str, Any]:
    """Return the fields that an engine's description of an image gives."""
    if not _ID.fullmatch(found["Id"]):
        raise ValueError(found["Id"])
    config, cpu = found["Config"], str(found["Architecture"])
    kept = ("Entrypoint", "Cmd", "Env", "User", "WorkingDir")
    parts = [cpu, found["RootFS"]["Layers"], *(config.get(key) or "" for key in kept)]
    entry = " ".join(config.get("Entrypoint") or ())
    variables = dict(pair.partition("=")[::2] for pair in config.get("Env") or ())
    versions = (re.search(r"\d+\.\d+", variables.get(name, "")) for name in _CUDA)
    return {
        "id": found["Id"],
        "content": digest(json.dumps(parts)),
        "wraps": bool(entry) and not _PROGRAM.search(entry),
        "digests": tuple(map(str, found.get("RepoDigests") or ())),
        "size": whole_number(found.get("Size", 0)),
        "owner": str(config.get("User") or ""),
        "layer": str((config.get("Labels") or {}).get(LAYER, "")),
        "cpu": cpu,
        "cuda": next((found[0] for found in versions if found), ""),
    }


def contents_inside() -> ImageContents:
    """Return what is installed where this is called: in a container. Raises HostError."""
    found, ptxas = read_software(None, os.environ), find_ptxas(LIVE, os.environ)
    return ImageContents(software=found, ptxas=ptxas, **ask(found.python, _ASKED))


def last_line(done: Completed) -> str:
    """Return what a program that failed said last."""
    return (
        (done.errors.strip() or done.output.strip() or done.trouble)
        .splitlines()[-1]
        .strip()
    )
