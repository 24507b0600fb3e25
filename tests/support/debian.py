"""Keep NCCL's sources, which no package index has: Debian and Ubuntu carry upstream's archive."""

from __future__ import annotations

import contextlib
import platform
import shutil
import tempfile
from pathlib import Path

from patchkit.errors import PatchkitError
from patchkit.process import run
from patchkit.source.fetch import cache_dir

_VERSION = "2.29.7"
# Debian's orig tarball is, byte for byte, what upstream's archive URL delivers.
_SUITES = {"debian": "sid contrib", "ubuntu": "{codename} multiverse"}


def keep_nccl() -> None:
    """Put NCCL into patchkit's cache, from the distribution, if it is not there and apt has it.

    apt is run with lists, cache and sources of its own in a throw-away folder: no root, no change
    to the system. Which bytes arrived is for who takes them to check.
    """
    place = cache_dir() / "sources" / f"nccl-{_VERSION}.tar.gz"
    system = platform.freedesktop_os_release() if not place.exists() else {}
    if not shutil.which("apt-get") or system.get("ID") not in _SUITES:
        return
    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(PatchkitError):
        folder = Path(scratch)
        suite = _SUITES[system["ID"]].format(
            codename=system.get("VERSION_CODENAME", "")
        )
        targets = run(
            "apt-get", "indextargets", "--format", "$(REPO_URI)"
        ).output.split()
        lines = [f"deb-src {uri} {suite}\n" for uri in dict.fromkeys(targets)]
        (folder / "sources.list").write_text("".join(lines), encoding="utf-8")
        for name in ("state/lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        (folder / "state/status").touch()
        options = {
            "Dir::Etc::sourcelist": folder / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State": folder / "state",
            "Dir::State::status": folder / "state/status",
            "Dir::Cache": folder / "cache",
            "APT::Sandbox::User": "root",  # no other user: the folder is the caller's
        }
        apt = [
            "apt-get",
            "-qq",
            *(f"-o{key}={value}" for key, value in options.items()),
        ]
        # A mirror that lacks other lists, or the packaging, is no reason to stop.
        run(*apt, "update", check=False, timeout=600)
        run(
            *apt,
            "source",
            "--download-only",
            "nvidia-nccl",
            cwd=folder,
            check=False,
            timeout=600,
        )
        for found in folder.glob(f"nvidia-nccl_{_VERSION}*.orig.tar.gz"):
            place.parent.mkdir(parents=True, exist_ok=True)
            part = place.with_suffix(".part")
            shutil.copyfile(found, part)
            part.replace(place)
