"""Make a release: version, changelog, tag, sdist and wheel, all checked, or nothing.

    nox -s release -- X.Y.Z [--dry-run]

It works in a clone. There the version goes into patchkit/__init__.py, the date into CHANGELOG.md;
both are committed and tagged. Sdist and wheel are built from that commit, twice to the same bytes,
and checked by twine, by what is in them, and by what the wheel runs with click alone. Then the
commit and the tag come into this checkout, and the files into dist/. What is left is to push and to
upload, which it does not do.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from packaging.version import InvalidVersion, Version

from patchkit.digests import sha256_of
from patchkit.errors import BuildError, ProofError, StorageError, UsageError
from patchkit.process import run
from tools import run_program

ROOT = Path(__file__).parents[1]
_VERSION = re.compile(r'^__version__ = "(?P<version>[^"]+)"$', re.MULTILINE)
_HEADING = re.compile(r"^## (?P<version>\S+) \(unreleased\)$", re.MULTILINE)
_LARGEST = 2 << 20  # bytes of a wheel: text and a few tables


def stamped(package: str, changelog: str, version: str, day: str) -> tuple[str, str]:
    """Return the texts of patchkit/__init__.py and CHANGELOG.md of a release.

    Raises UsageError for a version that does not follow, and without an unreleased part.
    """
    try:
        wanted = Version(version)
    except InvalidVersion:
        raise UsageError(f"{version!r} is not a version") from None
    current = Version(_VERSION.search(package)["version"])
    if wanted < current or wanted.local or wanted.is_devrelease:
        raise UsageError(f"{version} does not follow {current}")
    if not _HEADING.search(changelog):
        raise UsageError(
            "CHANGELOG.md has no part `## X.Y.Z (unreleased)`: say what has changed, below one"
        )
    return (
        _VERSION.sub(f'__version__ = "{version}"', package),
        _HEADING.sub(f"## {version} ({day})", changelog, count=1),
    )


def check_wheel(path: Path) -> None:
    """Raise ProofError if a wheel holds what it should not, or lacks what it should have."""
    with zipfile.ZipFile(path) as bundle:
        names = bundle.namelist()
    strange = [
        name
        for name in names
        if PurePosixPath(name).parts[0] != "patchkit" and ".dist-info/" not in name
    ]
    strange += [name for name in names if "/tests/" in name or "__pycache__" in name]
    missing = {
        "patchkit/py.typed",
        "patchkit/recipes/targets.toml",
        "patchkit/recipes/vllm/recipe.toml",
        "patchkit/recipes/wheel/CMakeLists.txt",
    } - set(names)
    _require(path, strange, sorted(missing))


def check_sdist(path: Path) -> None:
    """Raise ProofError if an sdist holds a link or what is made, or lacks tests, tools or pages."""
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members}
    strange = [
        member.name for member in members if not (member.isfile() or member.isdir())
    ]
    strange += [
        name for name in names if "__pycache__" in name or name.endswith(".whl")
    ]
    folders = {name.partition("/")[0] for name in names}
    wanted = {"patchkit", "tests", "tools", "docs", "noxfile.py", "LICENSE", "PKG-INFO"}
    _require(path, strange, sorted(wanted - folders))


def check_alone(wheel: Path, folder: Path) -> None:
    """Raise ProofError unless probe, env and doctor --log run with click and nothing else."""
    run(sys.executable, "-m", "venv", folder, kind=ProofError)
    python = folder / "bin" / "python"
    install = ("install", "--quiet", "--disable-pip-version-check", "--no-deps")
    run(python, "-m", "pip", *install, wheel, "click", kind=ProofError)
    (folder / "vllm.log").write_text("INFO: Application startup complete.\n")
    for words in (["probe"], ["env", "explain"], ["doctor", "--log", "vllm.log"]):
        run(python, "-m", "patchkit", *words, cwd=folder, kind=ProofError)


def _require(path: Path, strange: list[str], missing: list[str]) -> None:
    size = path.stat().st_size
    if strange or missing or size > _LARGEST:
        raise ProofError(
            f"{path.name} ({size:,} bytes) should have {', '.join(missing) or 'nothing'} besides, "
            f"and not {', '.join(strange) or 'anything less'}",
            hint="look at [tool.hatch.build] in pyproject.toml",
        )


def main(arguments: list[str]) -> int:
    """Make the release, and say what is left to do."""
    parser = argparse.ArgumentParser(prog="release", description=__doc__)
    parser.add_argument("version")
    parser.add_argument(
        "--dry-run", action="store_true", help="leave the checkout as it is"
    )
    asked = parser.parse_args(arguments)
    tag = f"v{asked.version}"
    if _git(ROOT, "status", "--porcelain"):
        raise UsageError(
            "the checkout has changes: commit them, or put them aside with `git stash`"
        )
    if _git(ROOT, "tag", "--list", tag):
        raise UsageError(f"{tag} is there already")
    with tempfile.TemporaryDirectory(prefix="patchkit-release-") as folder:
        clone = Path(folder) / "clone"
        # A clone has what is committed and nothing else, so neither have the files.
        _git(ROOT, "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone))
        _commit(clone, asked.version, tag)
        files = _built(clone)
        names = ", ".join(each.name for each in files)
        if asked.dry_run:
            print(f"{tag} can be made: {names}; nothing was changed")
        else:
            # Fails, and changes nothing, if the checkout has moved on meanwhile.
            _git(ROOT, "pull", "--quiet", "--ff-only", "--tags", str(clone), "HEAD")
            (ROOT / "dist").mkdir(exist_ok=True)
            for each in files:
                shutil.copy2(each, ROOT / "dist")
            print(f"{tag}: {names}, in dist/")
            print(f"next: git push --follow-tags; twine upload dist/*-{asked.version}*")
    return 0


def _commit(clone: Path, version: str, tag: str) -> None:
    places = clone / "patchkit" / "__init__.py", clone / "CHANGELOG.md"
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    texts = stamped(
        *(each.read_text(encoding="utf-8") for each in places), version, day
    )
    for place, text in zip(places, texts, strict=True):
        place.write_text(text, encoding="utf-8")
    for key in (
        "user.name",
        "user.email",
    ):  # those of the checkout, wherever they are set
        if value := _git(ROOT, "config", "--default", "", "--get", key):
            _git(clone, "config", key, value)
    _git(clone, "commit", "--quiet", "--all", "--message", f"Release {version}")
    _git(clone, "tag", "--annotate", tag, "--message", f"patchkit {version}")


def _built(clone: Path) -> list[Path]:
    """Build both files from the commit, and check them."""
    python = sys.executable
    for out in ("dist", "again"):
        run(
            python,
            "-m",
            "build",
            "--no-isolation",
            f"--outdir={out}",
            cwd=clone,
            kind=BuildError,
        )
    files = sorted((clone / "dist").iterdir())
    if other := [
        e.name for e in files if sha256_of(e) != sha256_of(clone / "again" / e.name)
    ]:
        raise ProofError(
            f"built twice, these are not the same bytes: {', '.join(other)}"
        )
    run(python, "-m", "twine", "check", "--strict", *files, cwd=clone, kind=ProofError)
    for each in files:
        (check_wheel if each.suffix == ".whl" else check_sdist)(each)
    check_alone(next(each for each in files if each.suffix == ".whl"), clone / "alone")
    return files


def _git(folder: Path, *arguments: str) -> str:
    return run("git", *arguments, cwd=folder, kind=StorageError).output.strip()


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
