"""A small image in which vLLM seems to be installed, for docker and podman: a program is the fake.

It is written as `docker save` writes one, without an engine; the entry point is that of vLLM's own.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from e2e.lifecycle import fake_venv
from e2e.lifecycle.fake_vllm import VERSION
from e2e.lifecycle.nodes import SystemdNode
from e2e.proofs import fresh

NAME = f"localhost/vllm-fake:{VERSION}"
ENTRY = ("vllm", "serve")
CPUS = {"x86_64": "amd64", "aarch64": "arm64"}
PACKAGES = ("python3", "dash", "coreutils")
SITE = "usr/local/lib/python3/dist-packages"  # PYTHONPATH has it, whichever Python 3 it is
UNUSED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var")
ENV = ("PATH=/usr/local/bin:/usr/bin:/bin", f"PYTHONPATH=/{SITE}", "PYTHONDONTWRITEBYTECODE=1")


def ready(cache: Path, entry: Sequence[str] = ENTRY) -> Path:
    """Return the image's archive; it is made of packages that are unpacked once.

    Raises CalledProcessError after mmdebstrap said why.
    """
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    root = cache / f"image-{release}"
    if not root.is_dir():
        options = ("--variant=extract", '--aptopt=Apt::Install-Recommends "false"')
        begun = cache / f"{root.name}.begun"
        shutil.rmtree(begun, ignore_errors=True)
        fresh.unpack(begun, PACKAGES, *options, release=release)
        begun.rename(root)
    program = b"#!/usr/bin/python3\n" + fake_venv.PROGRAM.read_bytes()
    files = {"etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n", "usr/local/bin/vllm": program}
    for wheel in fake_venv.made_wheels():
        with zipfile.ZipFile(io.BytesIO(wheel)) as file:
            files |= {f"{SITE}/{name}": file.read(name) for name in file.namelist()}
    archive = cache / "image.tar"
    write_archive(archive, root, files, {"Entrypoint": [*entry], "Env": ENV})
    return archive


def write_archive(
    archive: Path, root: Path, files: dict[str, bytes], settings: dict[str, object]
) -> None:
    """Write an image of one layer: a folder, and files beside it; its id is a digest of all."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for path in sorted(root.iterdir()):
            tar.add(path, path.name, filter=_keep)
        for name, content in files.items():
            _add(tar, name, content, 0o755 if "/bin/" in name else 0o644)
    of_layer = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": CPUS[platform.machine()],
        "os": "linux",
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{of_layer}"]},
    }
    text = json.dumps(config).encode()
    named = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = [{"Config": named, "RepoTags": [NAME], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        _add(tar, "layer.tar", layer.getvalue())
        _add(tar, named, text)
        _add(tar, "manifest.json", json.dumps(manifest).encode())


def install(node: SystemdNode, engine: str, archive: Path) -> str:
    """Let a node's engine have it. Return its id, sha256:… Raises NodeError."""
    fake_venv.insist_user(node, engine, "load", input=archive.read_bytes())
    found = fake_venv.insist_user(node, engine, "image", "inspect", "--format={{.Id}}", NAME)
    pin = found.strip().removeprefix("sha256:")
    fake_venv.insist_user(node, engine, "tag", NAME, f"localhost/patchkit:{pin[:12]}")
    return f"sha256:{pin}"


def _keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    usual = member.isreg() or member.isdir() or member.issym()
    return member if usual and not member.name.startswith(UNUSED) else None


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    tar.addfile(member, io.BytesIO(content))
