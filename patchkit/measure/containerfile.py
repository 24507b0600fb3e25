"""Write a Containerfile that installs a filled wheelhouse, with its commands. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from patchkit import __version__
from patchkit.errors import SourceError, UsageError
from patchkit.paths import RECIPES
from patchkit.quoting import quoted
from patchkit.records import read_toml
from patchkit.wheel.wheelhouse.manifest import REQUIREMENTS, Kind, Manifest, ManifestEntry

_MOUNT = "/wheelhouse"
_IMAGE = "vllm-wheelhouse"
_NCCL = "nvidia-nccl-cu13"
# Reference of an image: host, path, a tag, a digest. Nothing of it ends a line or a word.
_PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,400}@sha256:[0-9a-f]{64}")
_TAGGED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,400}")
_FOLDER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_./-]{0,200}")
_PYTHON = re.compile(r"3\.\d{1,2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Smoke:
    imports: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """Hold what recipes/image.toml says; ``platforms`` are by the CPU of a wheelhouse."""

    packages: tuple[str, ...]
    leftovers: tuple[str, ...]
    user: str
    id: int
    venv: str
    platforms: Mapping[str, str]
    smoke: _Smoke


@cache
def image_facts() -> ImageFacts:
    """Return what an image holds beside the wheelhouse."""
    return read_toml(ImageFacts, RECIPES / "image.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Containerfile:
    """Hold the text, and the platform that it is for: ``linux/arm64``."""

    text: str
    platform: str


def check_base(base: str, *, pinned: bool = True) -> None:
    """Raise UsageError unless this names an image, by its digest if it has to be pinned."""
    if _PINNED.fullmatch(base):
        return
    if not _TAGGED.fullmatch(base):
        raise UsageError(f"{base!r} is not the name of an image")
    if not pinned:
        return
    raise UsageError(
        f"{base}: names no digest, so that the same file would make another image tomorrow",
        hint=f"`{quoted('docker', 'buildx', 'imagetools', 'inspect', base)}` prints it: "
        f"--base {base}@sha256:…; or say --unpinned",
    )


def containerfile(manifest: Manifest, base: str, folder: str) -> Containerfile:
    """Return the file for a wheelhouse that lies in ``folder`` of the build's context.

    Raises SourceError if the wheelhouse is not filled, or is for several machines; UsageError for a
    folder that does not fit into a line of the file.
    """
    if not _FOLDER.fullmatch(folder) or ".." in folder.split("/"):
        raise UsageError(
            f"{folder!r}: a folder below the one that is built from, of letters, digits, . _ - /"
        )
    python, machine = _node(manifest)
    facts = image_facts()
    names = {each.name.project for each in manifest.wheels if each.held}
    packages = [each.format(python=python) for each in facts.packages]
    imports = [each for each in facts.smoke.imports if each in names]
    lines = [
        f"# By patchkit {__version__}: {len(names)} wheels for {machine}, CPython {python}.",
        "# Nothing is fetched but packages of the base's distribution, which no file pins.",
        f"FROM {base}",
        "",
        *_apt(packages, facts.leftovers),
        "",
        f"RUN --mount=type=bind,source={folder},target={_MOUNT} \\",
        *_install(python, facts.venv, manifest.install_options),
        "",
        *_user(facts),
        "",
        "# What a build can prove: the wheels fit together and load. A GPU it has none.",
        "RUN mkdir /tmp/smoke && export HOME=/tmp/smoke TMPDIR=/tmp/smoke && \\",
        f"    {facts.venv}/bin/python -B -c '{_smoke(imports, facts, nccl=_NCCL in names)}' && \\",
        "    rm -r /tmp/smoke",
        "",
        f'ENTRYPOINT ["{"vllm" if "vllm" in names else "python"}"]',
    ]
    return Containerfile(text="\n".join(lines) + "\n", platform=facts.platforms[machine])


def _node(manifest: Manifest) -> tuple[str, str]:
    """Return the Python and the CPU that a wheelhouse was filled for."""
    if missing := [each.filename for each in manifest.wheels if each.kind is Kind.LOCKED]:
        raise SourceError(
            f"the wheelhouse only locks {len(missing)} wheels, such as {missing[0]}",
            why="an image is built without an index",
            hint="patchkit wheelhouse fill",
        )
    filled = [each for each in manifest.wheels if each.kind is Kind.DEPENDENCY]
    found = {(_fact(each, "python"), _fact(each, "machine")) for each in filled}
    if len(found) != 1:
        raise SourceError(
            "the wheelhouse is not filled for one machine", hint="patchkit wheelhouse fill"
        )
    python, machine = found.pop()
    if not _PYTHON.fullmatch(python) or machine not in image_facts().platforms:
        raise SourceError(f"the wheelhouse is for CPython {python!r} on {machine!r}")
    return python, machine


def _fact(entry: ManifestEntry, name: str) -> str:
    return str(entry.facts.get(name, ""))


def _apt(packages: Sequence[str], leftovers: Sequence[str]) -> list[str]:
    return [
        "RUN apt-get update && \\",
        "    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \\",
        *(f"      {each} \\" for each in packages),
        "    && rm -rf \\",
        *(f"      {each} \\" for each in leftovers[:-1]),
        f"      {leftovers[-1]}",
    ]


def _install(python: str, venv: str, options: Sequence[str]) -> list[str]:
    install = ("install", *options, "--require-hashes", "--no-cache-dir", "--no-compile")
    source = ("--find-links", _MOUNT, "--requirement", f"{_MOUNT}/{REQUIREMENTS}")
    return [
        "    " + quoted(f"python{python}", "-m", "venv", venv) + " && \\",
        "    " + quoted(f"{venv}/bin/python", "-m", "pip", *install, *source) + " && \\",
        "    "
        + quoted("find", venv, "-name", "__pycache__", "-prune", "-exec", "rm", "-r", "{}", "+"),
    ]


def _user(facts: ImageFacts) -> list[str]:
    home, name = f"/home/{facts.user}", facts.user
    return [
        # Not useradd: it writes the day into /etc/shadow.
        f"RUN echo '{name}:x:{facts.id}:{facts.id}::{home}:/bin/sh' >> /etc/passwd && \\",
        f"    echo '{name}:x:{facts.id}:' >> /etc/group && \\",
        f"    install -d -o {facts.id} -g {facts.id} {home} {home}/.cache",
        f"ENV PATH={facts.venv}/bin:/usr/local/bin:/usr/bin:/usr/sbin",
        f"ENV HOME={home} PYTHONUNBUFFERED=1",
        f"USER {facts.id}:{facts.id}",
        f"WORKDIR {home}",
    ]


def _smoke(imports: Sequence[str], facts: ImageFacts, *, nccl: bool) -> str:
    """Return a line of Python that fails unless all loads, libnccl from the wheelhouse alone.

    There are no single quotes in it: the shell has it in them.
    """
    library = f"{facts.venv}/lib/python*/site-packages/nvidia/nccl/lib/libnccl.so.2"
    parts = [f"import {each}" for each in imports]
    if nccl:
        parts += [
            "import ctypes, glob",
            f'ctypes.CDLL(*glob.glob("{library}"))',
            'found = {l.split()[-1] for l in open("/proc/self/maps") if "libnccl.so" in l}',
            f'assert [p.startswith("{facts.venv}/") for p in found] == [True], found',
            "print(*found)",
        ]
    return "; ".join(parts) or "pass"


def build_lines(platform: str, file: Path) -> Iterator[tuple[str, ...]]:
    """Yield the command of each builder, for the folder that holds the wheelhouse.

    Times of files are those of 1970, so that the same wheelhouse makes the same layers.
    """
    named = ("--platform", platform, "--file", str(file), "--tag", _IMAGE)
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
        *(_IMAGE, "serve", "/srv/models/MODEL", "--host", "127.0.0.1"),
    )
    yield ("docker", "run", "--rm", "--gpus", "all", *node)
    yield ("podman", "run", "--rm", "--device", "nvidia.com/gpu=all", *node)
