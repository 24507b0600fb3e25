"""A small image in which vLLM seems to be installed, for docker and podman: a program is the fake.

It is written as `docker save` writes one, without an engine; the entry point is that of vLLM's own.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from e2e.lifecycle import fake_venv
from e2e.lifecycle.fake_vllm import VERSION
from e2e.lifecycle.nodes import SystemdNode
from e2e.lifecycle.rootfs import REGISTRY
from e2e.proofs import fresh
from patchkit.digests import sha256_of

NAME = f"localhost/vllm-fake:{VERSION}"
PULLED = f"{REGISTRY}/vllm-fake:{VERSION}"
FOLDER = "images"
LOAD_SECONDS = 300
CPUS = {"x86_64": "amd64", "aarch64": "arm64"}
PACKAGES = ("python3", "dash", "coreutils")
SITE = (
    "usr/local/lib/python3/dist-packages"  # PYTHONPATH has it, whichever Python 3 it is
)
PASSWD = {"etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n"}
UNUSED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var", f"{SITE}/ray")
ENV = (
    "PATH=/usr/local/bin:/usr/bin:/bin",
    f"PYTHONPATH=/{SITE}",
    "PYTHONDONTWRITEBYTECODE=1",
)


def ready(cache: Path) -> Path:
    """Return the archive of the stand-in's image."""
    files = {
        "usr/local/bin/vllm": b"#!/usr/bin/python3\n" + fake_venv.PROGRAM.read_bytes()
    }
    for wheel in fake_venv.made_wheels():
        with zipfile.ZipFile(io.BytesIO(wheel)) as file:
            files |= {f"{SITE}/{name}": file.read(name) for name in file.namelist()}
    return write_archive(
        cache / FOLDER / "fake.tar", {"": unpack(cache, PACKAGES)}, files
    )


def unpack(cache: Path, packages: Sequence[str]) -> Path:
    """Return a folder with packages of the distribution, unpacked once.

    Raises CalledProcessError after mmdebstrap said why.
    """
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    made_of = hashlib.sha256(" ".join([release, *packages]).encode()).hexdigest()
    root = cache / f"image-{made_of[:12]}"
    if not root.is_dir():
        options = ("--variant=extract", '--aptopt=Apt::Install-Recommends "false"')
        begun = cache / f"{root.name}.{os.getpid()}"
        fresh.unpack(begun, packages, *options, release=release)
        begun.rename(root)
    return root


def write_archive(
    archive: Path, folders: Mapping[str, Path], files: Mapping[str, bytes]
) -> Path:
    """Write an image of one layer, folders by their place and files; its id is a digest of all."""
    archive.parent.mkdir(exist_ok=True)
    layer = archive.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar:
        for place, folder in folders.items():
            for path in sorted(folder.iterdir()):
                tar.add(path, f"{place}{path.name}", filter=_keep)
        for name, content in {**PASSWD, **files}.items():
            _add(tar, name, content, 0o755 if "/bin/" in name else 0o644)
    config = {
        "architecture": CPUS[platform.machine()],
        "os": "linux",
        "config": {"Entrypoint": ["vllm", "serve"], "Env": ENV},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256_of(layer)}"]},
        "history": [{"created_by": "e2e.lifecycle.image"}],  # podman builds on no other
    }
    text = json.dumps(config).encode()
    named = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = [{"Config": named, "RepoTags": [NAME], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        tar.add(layer, "layer.tar")
        _add(tar, named, text)
        _add(tar, "manifest.json", json.dumps(manifest).encode())
    layer.unlink()
    return archive


def load(node: SystemdNode, engine: str, archive: Path) -> None:
    """Load it on a node that sees the archive's folder. Raises NodeError."""
    fake_venv.insist_user(
        node, engine, "load", "--input", archive, seconds=LOAD_SECONDS
    )


def install(node: SystemdNode, engine: str, archive: Path) -> str:
    """Give it to a node as `cluster install` does. Return its id, sha256:… Raises NodeError."""
    load(node, engine, archive)
    found = fake_venv.insist_user(
        node, engine, "image", "inspect", "--format={{.Id}}", NAME
    )
    pin = found.strip().removeprefix("sha256:")
    fake_venv.insist_user(node, engine, "tag", NAME, f"localhost/patchkit:{pin[:12]}")
    return f"sha256:{pin}"


def _keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.isdev() or member.name.startswith(UNUSED) else member


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    tar.addfile(member, io.BytesIO(content))
