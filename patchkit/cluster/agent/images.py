"""Bring a container image to a node: pull, save, load, tag; patch its vLLM. Runs on the node."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from patchkit.cluster.agent.image_facts import (
    ENGINES,
    LAYER,
    ImageFacts,
    find_image,
)
from patchkit.cluster.agent.installation import share_folder
from patchkit.cluster.models.model_files import require_room
from patchkit.cluster.ssh.answer import Steps
from patchkit.cluster.ssh.node import require_rsync
from patchkit.errors import BuildError, HostError, StorageError, translated
from patchkit.follow import Follow
from patchkit.frozen import Texts, frozen
from patchkit.process import attempt, run
from patchkit.quoting import quoted
from patchkit.records import matching

_MAKE_ROOM = (
    "make room there: `docker system df`, `podman system df` say what images take"
)
# Docker's older builder has no `RUN --mount`. An attestation would hold the time of the build.
_BUILDKIT = {
    "DOCKER_BUILDKIT": "1",
    "BUILDKIT_PROGRESS": "plain",
    "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
}
_STEP = re.compile(r"^#\d+ [\d.]+ ")  # what BuildKit puts before each line
_PROGRESS = re.compile(r": ([\d,]+) of ([\d,]+) MB")  # of `apply --native`
_MARKS = (
    "✓ ",
    "✗ ",
    "error: ",
    "why: ",
)  # begin the lines that `apply` and engines report
_LOADED = re.compile(r"(?m)^Loaded image[^:\n]*: *(\S+)")


@frozen
class BuiltImage:
    """The id of an image that was built, and the lines that `apply` wrote during the build."""

    id: Annotated[str, matching("[0-9a-f]{64}", "an id")]
    said: Texts


def pull_image(
    engine: str,
    reference: str,
    names: Sequence[str],
) -> ImageFacts:
    """Pull an image; return the facts of the first image that exists of ``names``.

    Raises StorageError for a full disk, HostError for any other failure of the pull.
    """
    done = attempt(engine, "pull", reference, timeout=None)
    if not done.trouble:
        return find_image(engine, names)

    what = f"cannot pull {reference}: {done.last_line()}"
    if "no space left" in done.output + done.errors:
        raise StorageError(
            what,
            why="the disk is full",
            hint=_MAKE_ROOM,
        )
    why = "no such image, no network, or no login there"
    raise HostError(
        what,
        why=why,
        hint=quoted(engine, "pull", reference),
    )


def save_image(
    engine: str,
    image: str,
    size: int,
) -> str:
    """Save an image of ``size`` bytes; return the path of the archive, also of an earlier one.

    The archive is whole or does not exist. Raises StorageError if it has no room, HostError if the
    engine fails.
    """
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


def make_image_room(
    engine: str,
    root: str,
    size: int,
) -> str:
    """Return the folder for the archive of an image of ``size`` bytes; make it.

    ``root`` is the folder of the engine's images. Raises StorageError if the archive has no room,
    or what the engine makes of it; HostError without rsync.
    """
    require_rsync()
    folder = share_folder("images")

    with translated(at=folder):
        folder.mkdir(parents=True, exist_ok=True)
        files = (file for file in folder.iterdir() if file.is_file())
        present = sum(file.stat().st_size for file in files)
        unpacked = size * ENGINES[engine].copies

        # If both are on one disk, its free room has to do for both.
        device = folder.stat().st_dev
        is_shared = Path(root).stat().st_dev == device
        archive = size + unpacked * is_shared

        require_room(folder, archive - present, hint=_MAKE_ROOM)
        require_room(Path(root), unpacked, hint=_MAKE_ROOM)
    return str(folder)


def load_image(
    engine: str,
    archive: str,
    image: str,
) -> ImageFacts:
    """Load an image from an archive, and remove the archive; return the image's facts.

    Raises HostError if the engine fails.
    """
    done = run(engine, "load", "--input", archive, timeout=None, hint=_MAKE_ROOM)
    Path(archive).unlink()
    # In another kind of store it has another id: the engine's words name it as well.
    return find_image(engine, [image, *_LOADED.findall(done.output)])


def tag_image(
    engine: str,
    image: str,
    tag: str,
) -> None:
    """Give an image the name by which `up` finds it; remove the archives of images."""
    run(engine, "tag", image, tag, hint=quoted(engine, "info"))
    shutil.rmtree(share_folder("images"), ignore_errors=True)


def build_layer(
    engine: str,
    kit: str,
    label: str,
) -> Steps[BuiltImage]:
    """Build an image from the archive ``kit``; yield the bytes of native code so far, and of all.

    The image gets the label ``LAYER`` with the value ``label``. Raises BuildError with the lines
    that report what failed.
    """
    folder = share_folder("images") / "kit"
    with translated(at=folder):
        shutil.rmtree(folder, ignore_errors=True)
        # Without `filter`, which Python has only since 3.11.4; the launcher made the archive.
        shutil.unpack_archive(kit, folder)

    number = folder.with_name("kit.id")
    words = [engine, "build", "--network=none", *ENGINES[engine].layer]
    words += [f"--label={LAYER}={label}", "--file", str(folder / "Containerfile")]
    words += ["--iidfile", str(number), str(folder)]

    lines = []
    with Follow(*words, env={**os.environ, **_BUILDKIT}) as building:
        for output in building:
            line = _STEP.sub("", output).strip()
            if line.lower().startswith(_MARKS):
                lines.append(line)
            if progress := _PROGRESS.search(line):
                yield _bytes(progress[1]), _bytes(progress[2])

    if building.done.trouble:
        troubles = [line for line in lines if not line.startswith("✓")]
        troubles = troubles or [building.done.last_line()]
        what = "\n".join(["the layer was not built:", *troubles[:3]])
        raise BuildError(what, hint=quoted(*words))
    return BuiltImage(
        id=number.read_text().removeprefix("sha256:"),
        said=tuple(lines),
    )


def _bytes(megabytes: str) -> int:
    return int(megabytes.replace(",", "")) * 10**6
