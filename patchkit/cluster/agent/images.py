"""Bring a container image to a node: pull, save, load, tag; patch its vLLM. Runs there."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from getpass import getuser
from pathlib import Path
from typing import Annotated, Any

from patchkit.cluster.agent.image_facts import ImageFacts, find_image, inspect_image
from patchkit.cluster.agent.installation import share_folder
from patchkit.cluster.models.names import require_room
from patchkit.cluster.ssh.rsync import require_rsync
from patchkit.errors import BuildError, HostError, StorageError, translated
from patchkit.follow import Completed, Follow
from patchkit.process import ask, attempt, run
from patchkit.quoting import quoted
from patchkit.records import matching
from patchkit.runtime.host.software import software

_ROOT = {"docker": "{{.DockerRootDir}}", "podman": "{{.Store.GraphRoot}}"}
_PATIENCE = 30.0  # seconds for an engine to answer
# Docker's load unpacks an archive below its root before it reads it: 759 MB of 795 were seen.
_COPIES = {"docker": 2, "podman": 1}
_MAKE_ROOM = "make room there: `docker system df`, `podman system df` say what images take"
# The same layer for the same input, as far as an engine knows how.
_TIMES = {"docker": ("--build-arg", "SOURCE_DATE_EPOCH=0"), "podman": ("--timestamp", "0")}
# Docker's older builder has no `RUN --mount`; and no attestation, which has the time of day.
_BUILDKIT = {
    "DOCKER_BUILDKIT": "1",
    "BUILDKIT_PROGRESS": "plain",
    "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
}
_STEP = re.compile(r"^#\d+ [\d.]+ ")  # before a line of a build by BuildKit
_FAR = re.compile(r": ([\d,]+) of ([\d,]+) MB")  # how far `apply --native` is
_TOLD = ("✓ ", "✗ ", "error: ", "why: ")  # before what `apply` and engines say
_ASKED = """
import platform, sys
answer = {"release": "%d.%d" % sys.version_info[:2], "machine": platform.machine()}
answer["glibc"] = platform.libc_ver()[1]
"""
_LOADED = re.compile(r"(?m)^Loaded image[^:\n]*: *(\S+)")
LAYER = "io.patchkit.layer"
"""The label of a patched image: what it was patched by, and for what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldImage:
    """An image that a node has, ``id`` is "" for none; ``root`` is where the engine keeps them.

    ``content`` is as in ImageFacts; ``digests`` are its names in registries; ``size`` is in bytes.
    """

    root: str
    id: Annotated[str, matching("([0-9a-f]{64})?", "an id")] = ""
    content: str = ""
    size: int = 0
    user: str = ""
    digests: tuple[str, ...] = ()
    layer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePython:
    """The Python in an image that has vLLM: its ``release``, and the package's folder."""

    python: str
    release: Annotated[str, matching(r"3\.\d{2}", "a release of Python")]
    machine: Annotated[str, matching("aarch64|x86_64", "a CPU")]
    glibc: Annotated[str, matching(r"2\.(1[7-9]|[2-9]\d)", "a release of glibc, 2.17 or later")]
    vllm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltImage:
    """The id of an image that was built, and what `apply` said in it."""

    id: Annotated[str, matching("[0-9a-f]{64}", "an id")]
    said: tuple[str, ...]


def hold_image(engine: str, names: Sequence[str]) -> dict[str, Any]:
    """Return what this node has by the first of these names. Raises HostError without engine."""
    done = attempt(engine, "info", f"--format={_ROOT[engine]}", timeout=_PATIENCE)
    if not done.started:
        package = "docker.io" if engine == "docker" else engine
        raise done.error(hint=quoted("sudo", "apt", "install", package))
    if done.trouble:
        hint = quoted("sudo", "usermod", "-aG", "docker", getuser()) + "`, log in again; `"
        raise HostError(
            f"{engine} does not work for this user: {_last_line(done)}",
            hint=f"`{hint if 'permission denied' in done.errors else ''}{engine} info`",
        )
    found = inspect_image(engine, names)
    config = found.get("Config", {})
    held = HeldImage(
        root=done.output.strip(),
        id=found.get("id", "").removeprefix("sha256:"),
        content=found.get("content", ""),
        size=found.get("Size", 0),
        user=config.get("User") or "",
        digests=tuple(found.get("RepoDigests") or ()),
        layer=(config.get("Labels") or {}).get(LAYER, ""),
    )
    return asdict(held)


def pull_image(engine: str, reference: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Pull an image; yield how many layers are here, at last ``{"result": HeldImage}``."""
    total = done = 0
    with Follow(engine, "pull", reference) as pulling:
        for line in pulling:
            total += "Pulling fs layer" in line
            done += "Pull complete" in line
            yield {"done": done, "total": total}
    if pulling.done.trouble:
        full = "no space left" in pulling.done.output
        raise (StorageError if full else HostError)(
            f"cannot pull {reference}: {_last_line(pulling.done)}",
            why="the disk is full" if full else "no such image, no network, or no login there",
            hint=_MAKE_ROOM if full else quoted(engine, "pull", reference),
        )
    yield {"result": hold_image(engine, names)}


def save_image(engine: str, image: str, size: int) -> Iterator[dict[str, Any]]:
    """Save an image; yield ``{"result": …}``, its archive, which is whole or not there."""
    archive = share_folder("images") / f"{image[:12]}.tar"
    part = archive.with_suffix(".part")
    with translated(at=part):
        if not archive.exists():
            require_room(archive.parent, size, hint=_MAKE_ROOM)
            archive.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            run(engine, "save", "--output", part, image, timeout=None, hint=_MAKE_ROOM)
            part.replace(archive)
    yield {"result": str(archive)}


def make_image_room(engine: str, root: str, size: int) -> str:
    """Return the folder where an image's archive goes. Raises StorageError if it has no room."""
    require_rsync()
    folder, copies = share_folder("images"), _COPIES[engine]
    with translated(at=folder):
        folder.mkdir(parents=True, exist_ok=True)
        held = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        # On one disk they share what is free.
        other = root if os.access(root, os.F_OK) else "/"
        same = Path(other).stat().st_dev == folder.stat().st_dev
        require_room(folder, size * (1 + copies * same) - held, hint=_MAKE_ROOM)
        require_room(Path(other), size * copies, hint=_MAKE_ROOM)
    return str(folder)


def load_image(engine: str, archive: str, image: str) -> Iterator[dict[str, Any]]:
    """Load an image from its archive, and remove that; yield ``{"result": HeldImage}``."""
    done = run(engine, "load", "--input", archive, timeout=None, hint=_MAKE_ROOM)
    Path(archive).unlink()
    # Another kind of store calls it otherwise.
    yield {"result": hold_image(engine, [image, *_LOADED.findall(done.output)])}


def tag_image(engine: str, image: str, tag: str) -> str:
    """Give an image the name by which `up` finds it; what its way here left is removed."""
    run(engine, "tag", image, tag, hint=quoted(engine, "info"))
    shutil.rmtree(share_folder("images"), ignore_errors=True)
    return image


def find_python(engine: str, tag: str) -> ImagePython:
    """Return the Python in an image that has vLLM; raises what ``python_inside`` raises."""
    program, user = shutil.which(engine) or "", f"{os.getuid()}:{os.getgid()}"
    facts = ImageFacts(program=program, user=user, **find_image(engine, [tag]))
    return facts.inside.call(ImagePython, python_inside)


def python_inside() -> dict[str, str]:
    """Return what `apply` has to know of an image, where this is called: in a container of it."""
    found = software(None, os.environ)
    if not found.vllm_home:
        raise HostError(f"{found.python} finds no vLLM", why="it is what is patched")
    return {"python": found.python, "vllm": found.vllm_home, **ask(found.python, _ASKED)}


def build_layer(engine: str, kit: str, label: str) -> Iterator[dict[str, Any]]:
    """Build an image from a kit that was sent; yield ``{"result": …}``: its id, and what was said.

    Raises BuildError with what the step said.
    """
    folder, lines = share_folder("images") / "kit", list[str]()
    with translated(at=folder), tarfile.open(kit) as archive:
        shutil.rmtree(folder, ignore_errors=True)
        archive.extractall(folder, filter="data")
    number = folder.with_name("kit.id")
    words = ("build", "--network=none", *_TIMES[engine], f"--label={LAYER}={label}")
    files = ("--file", folder / "Containerfile", "--iidfile", number)
    with Follow(engine, *words, *files, folder, env={**os.environ, **_BUILDKIT}) as building:
        for line in building:
            said = _STEP.sub("", line).strip()
            lines += [said] if said.lower().startswith(_TOLD) else []
            if far := _FAR.search(said):
                done, total = (int(each.replace(",", "")) * 10**6 for each in far.groups())
                yield {"done": done, "total": total}
    if building.done.trouble:
        wrong = [line for line in lines if line[0] != "✓"] or [_last_line(building.done)]
        hint = quoted(engine, *words, *files, folder)
        raise BuildError("\n".join(["the layer was not built:", *wrong[:3]]), hint=hint)
    image = number.read_text().removeprefix("sha256:")
    yield {"result": {"id": image, "said": lines}}


def _last_line(done: Completed) -> str:
    return (done.errors.strip() or done.output.strip() or done.trouble).splitlines()[-1].strip()
