"""The locks of the project's own sessions: requirements/*.txt, each version with its sha256.

    nox -s lock                     makes them from pyproject.toml; versions that still fit stay
    nox -s lock -- --upgrade        takes the newest that fit
    python -m tools.locks --check   says which are stale, without a network, and ends with 1

A lock is stale if what it was made from has changed: its head has the digest of that. It serves
every Python from 3.11.4 on and every CPU: where they need different versions, both are in it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A lock, and what is in it. What installs patchkit, too, has its requirements and its backend.
LOCKS = {
    "test": ("--extra=build", "--group=test", "pyproject.toml", "-"),
    "lint": ("--extra=build", "--group=lint", "pyproject.toml", "-"),
    "docs": ("--extra=build", "--group=test", "--group=docs", "pyproject.toml", "-"),
    "build": ("--extra=build", "--group=wheel", "pyproject.toml", "-"),
    "wheel": ("--group=wheel", "pyproject.toml", "-"),
    "ci": ("--group=ci",),
    "lock": ("--group=lock",),
    "release": ("--group=release", "-"),
}
# No index is named: the one that pip is configured for has to have the same files. Only wheels:
# a source would need a compiler on every machine, and what builds it would not be locked.
_COMPILE = (
    *("--universal", "--generate-hashes", "--only-binary=:all:"),
    *("--no-emit-index-url", "--no-header", "--quiet"),
)


def lock(root: Path, *options: str) -> None:
    """Write every lock, by uv. Raises CalledProcessError with what uv said on standard error."""
    backend = "\n".join(_pyproject(root)["build-system"]["requires"])
    for name, wanted in LOCKS.items():
        file = _file(root, name)
        command = [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "compile",
            *_COMPILE,
            *options,
            *wanted,
        ]
        subprocess.run(
            [*command, "-o", file], cwd=root, input=backend, text=True, check=True
        )
        file.write_text(f"{_head(root, name)}\n{file.read_text()}")


def stale(root: Path) -> list[str]:
    """Return the locks that were made from something else than what pyproject.toml says now."""
    return [
        name
        for name in LOCKS
        if not _file(root, name).read_text().startswith(_head(root, name))
    ]


def _head(root: Path, name: str) -> str:
    return f"# Made by `nox -s lock` from pyproject.toml.\n# inputs sha256:{_digest(root, name)}"


def _digest(root: Path, name: str) -> str:
    """Return the sha256 of everything in pyproject.toml that decides which versions are taken."""
    known = _pyproject(root)
    project = known["project"]
    keys = ("requires-python", "dependencies", "optional-dependencies")
    inputs = [
        LOCKS[name],
        known["build-system"]["requires"],
        {key: project[key] for key in keys},
        known["dependency-groups"],
    ]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _pyproject(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text())


def _file(root: Path, name: str) -> Path:
    return root / "requirements" / f"{name}.txt"


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)
    elif sys.argv[1:] != ["--check"]:
        lock(ROOT, *sys.argv[1:])
    elif names := stale(ROOT):
        files = ", ".join(f"requirements/{name}.txt" for name in names)
        sys.exit(f"{files}: made from another pyproject.toml\n  next: nox -s lock")
