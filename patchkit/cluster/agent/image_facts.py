"""Look at a container image on a node: its engine, what its config says, what is in it. Runs there.

What is in it its own Python says: patchkit is sent into a container as it is sent to a node.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from patchkit.cluster.agent.engine_facts import look_at_engine
from patchkit.cluster.agent.node_files import run_for_user
from patchkit.cluster.ssh.node import Remote
from patchkit.digests import digest
from patchkit.errors import HostError
from patchkit.process import attempt
from patchkit.records import matching
from patchkit.runtime.host.host import Software
from patchkit.runtime.host.machine_root import LIVE
from patchkit.runtime.host.software import find_ptxas, software

RUN_WORDS = {
    # Its daemon is root's, and not in the unit's control group. The files are those that vLLM
    # raises its own limit to (utils/system_utils.py: set_ulimit), and systemd's hard limit.
    "docker": (
        *("run", "--user={user}", "--ulimit=memlock=-1", "--ulimit=nofile=65535:524288"),
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

REMOVE_WORDS = {"docker": ("rm", "--force"), "podman": ("rm", "--force", "--time=0", "--ignore")}
"""By engine: how containers end at once."""

_ID = re.compile("(?:sha256:)?[0-9a-f]{64}")
# An entry point that is a program by itself; any other is one around what it is given.
_PROGRAM = re.compile(r"(?:^|[/ ])(?:vllm|python[\d.]*|(?:ba|da|z)?sh)(?: |$)|vllm\.entrypoints")
_PATIENCE = 30.0  # seconds for an engine to answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageContents:
    """What is in an image, as a container of it says."""

    software: Software | None = None
    ptxas: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """An image on a node: ``problem`` is a finding of survey.toml, "" for none, ``said`` its words.

    ``program`` is the engine, ``user`` who runs what is inside; ``content`` is a digest over what
    an engine calls ``id``, which is another in another kind of store. ``wraps``: the entry point
    runs what it is given; ``cdi``: GPUs are devices; ``infiniband``: those of RDMA are there.
    """

    program: Annotated[str, matching(r"(/.*/(docker|podman))?", "an engine")] = ""
    user: str = ""
    cdi: bool = False
    infiniband: bool = False
    id: str = ""
    content: str = ""
    wraps: bool = False
    software: Software | None = None
    ptxas: str = ""
    problem: str = ""
    said: str = ""

    @property
    def run(self) -> tuple[str, ...]:
        """Return the words of a container of this image that stand before its own options."""
        words = (word.format(user=self.user) for word in RUN_WORDS[Path(self.program).name])
        return (self.program, *words, "--rm", "--pull=never", "--log-driver=none")

    @property
    def remove(self) -> tuple[str, ...]:
        """Return the words before names of containers that end."""
        return (self.program, *REMOVE_WORDS[Path(self.program).name])

    @property
    def inside(self) -> Remote:
        """Return what calls functions in a container of the image, without a network."""
        entry = () if self.wraps else ("--entrypoint=",)
        way = (*self.run, "--interactive", "--network=none", *entry, self.id, "sh", "-c")
        return Remote("the image", way=way)


def look_at_image(engine: str, name: str, tag: str) -> ImageFacts:
    """Return what a node knows of the image ``name``, which ``tag`` is if `install` was here."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/bin:/bin"
    program = shutil.which(engine, path=path)
    if not program:
        return ImageFacts(problem="engine-missing")
    # As a unit would: a login may have a group that the user's systemd has not.
    run = ("--quiet", "--pipe", "--wait", "--collect", program, "version")
    done = run_for_user("systemd-run", *run, timeout=_PATIENCE)
    if done.trouble:
        said = (done.errors.strip() or done.trouble).splitlines()[-1]
        return ImageFacts(program=program, problem="engine-refuses", said=said)
    if "Podman Engine" in done.output:  # which some call docker
        program = shutil.which("podman", path=path) or program
    made = ImageFacts(
        program=program,
        user=f"{os.getuid()}:{os.getgid()}",
        infiniband=Path("/dev/infiniband").is_dir(),
    )
    problem = "engine-refuses"
    try:
        made = replace(made, **find_image(program, (tag, name, name.partition("@")[2])))
        made = replace(made, cdi=bool(look_at_engine(program, "").spec))
        if not made.id:
            return replace(made, problem="image-missing")
        problem = "image-silent"
        own = made.inside.call(ImageContents, contents_inside)
    except HostError as error:
        return replace(made, problem=problem, said=error.what)
    return replace(made, software=own.software, ptxas=own.ptxas)


def find_image(program: str, names: Iterable[str]) -> dict[str, Any]:
    """Return id, content and wraps of the first of these names that is there, {} for none."""
    found = inspect_image(program, names)
    return {key: found[key] for key in ("id", "content", "wraps") if found}


def inspect_image(program: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the same with all that the engine says of it."""
    for name in filter(None, names):
        done = attempt(program, "image", "inspect", "--", name, timeout=_PATIENCE)
        if not done.trouble:
            try:
                (found,) = json.loads(done.output)
                config, layers = found["Config"], found["RootFS"]["Layers"]
                kept = ("Entrypoint", "Cmd", "Env", "User", "WorkingDir")
                parts = [found["Architecture"], layers, *(config.get(key) or "" for key in kept)]
                entry = " ".join(config.get("Entrypoint") or ())
                if not _ID.fullmatch(found["Id"]):
                    raise ValueError(found["Id"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                what = f"{program} image inspect {name}: an answer that cannot be read: {error}"
                raise HostError(what) from None
            wraps = bool(entry) and not _PROGRAM.search(entry)
            own = {"id": found["Id"], "content": digest(json.dumps(parts)), "wraps": wraps}
            return {**found, **own}
    return {}


def contents_inside() -> ImageContents:
    """Return what is installed where this is called: in a container. Raises HostError."""
    found = software(None, os.environ)
    return ImageContents(software=found, ptxas=find_ptxas(LIVE, os.environ))
