"""Make a Containerfile that installs a filled wheelhouse, and the commands that build it. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from string import Template

from patchkit import __version__
from patchkit.errors import SourceError, UsageError
from patchkit.frozen import Texts, Values, frozen
from patchkit.quoting import quoted
from patchkit.records import RECIPES, read_toml
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.wheelhouse.storage import Kind, Manifest

# CPU of a wheelhouse → platform of an image.
PLATFORMS = {"aarch64": "linux/arm64", "x86_64": "linux/amd64"}
CACHE_HOME = "/home/vllm/.cache/patchkit"
"""The folder in the image for the caches of its user."""
_NCCL = "nvidia-nccl-cu13"
# Python that fails unless the only libnccl in the process is that of the wheelhouse. A shell gets
# it in single quotes, so it contains none.
_NCCL_SMOKE = (
    "import ctypes, glob; "
    'ctypes.CDLL(*glob.glob("/opt/vllm/lib/python*/site-packages/nvidia/nccl/lib/libnccl.so.2")); '
    'found = {l.split()[-1] for l in open("/proc/self/maps") if "libnccl.so" in l}; '
    'assert [p.startswith("/opt/vllm/") for p in found] == [True], found; print(*found)'
)
# References of images, with characters that cannot end a line or a word of a Containerfile.
_PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,400}@sha256:[0-9a-f]{64}")
_TAGGED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,400}")
_FOLDER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_./-]{0,200}")
_PYTHON = re.compile(r"3\.\d{1,2}")


@frozen
class Containerfile:
    """The text of a Containerfile, and the platform of its image: ``linux/arm64``."""

    text: str
    platform: str


def check_image(image: str, *, pinned: bool) -> None:
    """Raise UsageError unless a text names an image; if ``pinned``, it must name its digest."""
    if _PINNED.fullmatch(image):
        return
    if not _TAGGED.fullmatch(image):
        raise UsageError(f"{image!r} is not the name of an image")

    if pinned:
        look = quoted("docker", "buildx", "imagetools", "inspect", image)
        raise UsageError(
            f"{image}: names no digest, and its tag can be moved",
            why="tomorrow it is another image, and ranks of two do not understand each other",
            hint=f"`{look}` prints it: --base {image}@sha256:…; or say --unpinned",
        )


def containerfile(
    manifest: Manifest,
    base: str,
    folder: str,
    caches: Values,
) -> Containerfile:
    """Return the Containerfile for a wheelhouse in the folder ``folder`` of the build's context.

    ``base`` is the image to build on. ``caches`` maps variables of vLLM to folders for its caches,
    below CACHE_HOME. Raises SourceError if the wheelhouse is not filled, or for several machines;
    UsageError if the folder has characters that a line of the file cannot hold.
    """
    if not _FOLDER.fullmatch(folder) or ".." in folder.split("/"):
        raise UsageError(
            f"{folder!r}: a folder below the one that is built from, of letters, digits, . _ - /"
        )

    python, machine = _filled_node(manifest)
    projects = {entry.name.project for entry in manifest.wheels if entry.held}
    programs = sorted(library_rules().started.names & projects)

    template = (RECIPES / "export" / "Containerfile").read_text(encoding="utf-8")
    text = Template(template).substitute(
        version=__version__,
        count=len(projects),
        machine=machine,
        python=python,
        base=base,
        folder=folder,
        options=quoted(*manifest.install_options),
        caches="".join(f" {name}={place}" for name, place in caches.items()),
        smoke=_smoke_test(projects),
        program=next(iter(programs), "python"),
    )
    return Containerfile(text=text, platform=PLATFORMS[machine])


def _filled_node(manifest: Manifest) -> tuple[str, str]:
    """Return the Python and the CPU that a wheelhouse is filled for: ``3.12``, ``aarch64``.

    Raises SourceError if it only locks wheels, or is not filled for exactly one machine.
    """
    locked = [wheel.name for wheel in manifest.wheels if wheel.kind is Kind.LOCKED]
    if locked:
        raise SourceError(
            f"the wheelhouse only locks {len(locked)} wheels, such as {locked[0]}",
            why="an image is built without an index",
            hint="patchkit wheelhouse fill",
        )

    nodes = {
        (str(wheel.facts.get("python", "")), str(wheel.facts.get("machine", "")))
        for wheel in manifest.wheels
        if wheel.kind is Kind.DEPENDENCY
    }
    if len(nodes) != 1:
        raise SourceError(
            "the wheelhouse is not filled for one machine",
            hint="patchkit wheelhouse fill",
        )

    python, machine = nodes.pop()
    if not _PYTHON.fullmatch(python) or machine not in PLATFORMS:
        raise SourceError(f"the wheelhouse is for CPython {python!r} on {machine!r}")
    return python, machine


def _smoke_test(projects: Collection[str]) -> str:
    """Return Python statements that import the installed packages, to test the image."""
    packages = ("torch", *sorted(library_rules().started.names))
    statements = [f"import {package}" for package in packages if package in projects]
    if _NCCL in projects:
        statements.append(_NCCL_SMOKE)
    return "; ".join(statements) or "pass"


def build_commands(platform: str) -> list[list[str]]:
    """Return the command of each builder (docker, podman, buildah), to be run in the context.

    They are those of ``recipes/export/builders.toml``.
    """
    table = RECIPES / "export" / "builders.toml"
    commands = read_toml(tuple[Texts, ...], table, key="commands")
    return [[word.format(platform=platform) for word in words] for words in commands]
