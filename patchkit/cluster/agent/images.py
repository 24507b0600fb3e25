"""Bring a container image to a node: pull, save, load, tag; patch its vLLM. Runs there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from patchkit.cluster.agent.image_facts import LAYER, ImageFacts, find_image, last_line
from patchkit.cluster.agent.installation import share_folder
from patchkit.cluster.models.names import require_room
from patchkit.cluster.ssh.rsync import require_rsync
from patchkit.errors import BuildError, HostError, StorageError, translated
from patchkit.follow import Follow
from patchkit.process import attempt, run
from patchkit.quoting import quoted
from patchkit.records import matching

# Docker's load unpacks an archive below its root before it reads it: 759 MB of 795 were seen.
_COPIES = {"docker": 2, "podman": 1}
_MAKE_ROOM = (
    "make room there: `docker system df`, `podman system df` say what images take"
)
# The same layer for the same input, as far as an engine knows how.
_TIMES = {
    "docker": ("--build-arg", "SOURCE_DATE_EPOCH=0"),
    "podman": ("--timestamp", "0"),
}
# Docker's older builder has no `RUN --mount`; and no attestation, which has the time of day.
_BUILDKIT = {
    "DOCKER_BUILDKIT": "1",
    "BUILDKIT_PROGRESS": "plain",
    "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
}
_STEP = re.compile(r"^#\d+ [\d.]+ ")  # before a line of a build by BuildKit
_FAR = re.compile(r": ([\d,]+) of ([\d,]+) MB")  # how far `apply --native` is
_TOLD = ("✓ ", "✗ ", "error: ", "why: ")  # before what `apply` and engines say
_LOADED = re.compile(r"(?m)^Loaded image[^:\n]*: *(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltImage:
    """The id of an image that was built, and what `apply` said in it."""

    id: Annotated[str, matching("[0-9a-f]{64}", "an id")]
    said: tuple[str, ...]


def pull_image(engine: str, reference: str, names: Sequence[str]) -> ImageFacts:
    """Pull an image; return its facts."""
    done = attempt(engine, "pull", reference, timeout=None)
    if done.trouble:
        full = "no space left" in done.output + done.errors
        raise (StorageError if full else HostError)(
            f"cannot pull {reference}: {last_line(done)}",
            why="the disk is full"
            if full
            else "no such image, no network, or no login there",
            hint=_MAKE_ROOM if full else quoted(engine, "pull", reference),
        )
    return find_image(engine, names)


def save_image(engine: str, image: str, size: int) -> str:
    """Save an image; return its archive, which is whole or not there."""
    archive = share_folder("images") / f"{image[:12]}.tar"
    part = archive.with_suffix(".part")
    with translated(at=part):
        if not archive.exists():
            require_room(archive.parent, size, hint=_MAKE_ROOM)
            archive.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            run(engine, "save", "--output", part, image, timeout=None, hint=_MAKE_ROOM)
            part.replace(archive)
    return str(archive)


def make_image_room(engine: str, root: str, size: int) -> str:
    """Return the folder where an image's archive goes. Raises StorageError if it has no room."""
    require_rsync()
    folder, copies = share_folder("images"), _COPIES[engine]
    with translated(at=folder):
        folder.mkdir(parents=True, exist_ok=True)
        held = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        # On one disk they share what is free.
        same = Path(root).stat().st_dev == folder.stat().st_dev
        require_room(folder, size * (1 + copies * same) - held, hint=_MAKE_ROOM)
        require_room(Path(root), size * copies, hint=_MAKE_ROOM)
    return str(folder)


def load_image(engine: str, archive: str, image: str) -> ImageFacts:
    """Load an image from its archive, and remove that; return its facts."""
    done = run(engine, "load", "--input", archive, timeout=None, hint=_MAKE_ROOM)
    Path(archive).unlink()
    # Another kind of store calls it otherwise.
    return find_image(engine, [image, *_LOADED.findall(done.output)])


def tag_image(engine: str, image: str, tag: str) -> None:
    """Give an image the name by which `up` finds it; what its way here left is removed."""
    run(engine, "tag", image, tag, hint=quoted(engine, "info"))
    shutil.rmtree(share_folder("images"), ignore_errors=True)


def build_layer(
    engine: str, kit: str, label: str
) -> Generator[tuple[int, int], None, BuiltImage]:
    """Build an image from a kit that was sent; yield how far its native part is, in bytes.

    Raises BuildError with what the step said.
    """
    folder, lines = share_folder("images") / "kit", list[str]()
    with translated(at=folder):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.unpack_archive(
            kit, folder
        )  # Python before 3.11.4 has no tarfile's filter
    number = folder.with_name("kit.id")
    words = ("build", "--network=none", *_TIMES[engine], f"--label={LAYER}={label}")
    files = ("--file", folder / "Containerfile", "--iidfile", number)
    with Follow(
        engine, *words, *files, folder, env={**os.environ, **_BUILDKIT}
    ) as building:
        for line in building:
            said = _STEP.sub("", line).strip()
            lines += [said] if said.lower().startswith(_TOLD) else []
            if far := _FAR.search(said):
                done, total = (
                    int(each.replace(",", "")) * 10**6 for each in far.groups()
                )
                yield done, total
    if building.done.trouble:
        wrong = [line for line in lines if line[0] != "✓"] or [last_line(building.done)]
        hint = quoted(engine, *words, *files, folder)
        raise BuildError("\n".join(["the layer was not built:", *wrong[:3]]), hint=hint)
    return BuiltImage(id=number.read_text().removeprefix("sha256:"), said=tuple(lines))
