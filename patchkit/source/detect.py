"""Detect what a path holds (sources, a git checkout, an installed package), and its version."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from operator import truediv
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from patchkit.errors import PatchkitError, RecipeError, SourceError, UsageError
from patchkit.frozen import frozen
from patchkit.process import attempt
from patchkit.quoting import quoted
from patchkit.reading import LARGEST_IN_TREE, read_bytes, read_text
from patchkit.records import RECIPES, RecordError, read_json, read_toml
from patchkit.source.git import NO_FETCH
from patchkit.source.releases import guess_release, named_version, release_files
from patchkit.source.tree import RESTORE, Sandboxed, SourceTree

# A variable of setuptools-scm. Its version precedes any tag, here and in the build.
VERSION_VARIABLE = "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_VLLM"
# The Summary that a build writes into PKG-INFO of a copied fork, which has no history.
FORK = "a fork, which patchkit copied"
# git describe --long: v0.19.1-12-gabc1234, -0- on the tag itself.
_DESCRIBED = re.compile(r"(?P<tag>.+)-(?P<distance>\d+)-g(?P<commit>[0-9a-f]+)")
_RELEASE = re.compile(r"(?P<project>[A-Za-z0-9._-]+)==(?P<version>[^/]+)")
_ASSIGNED = re.compile(
    r"^(?P<name>NCCL_\w+)[ \t]*:=[ \t]*(?P<value>[^\s#]*)", re.MULTILINE
)


@frozen
class Project:
    """A project and the files that mark its trees; ``recipes/projects.toml`` has the fields."""

    title: str
    markers: tuple[str, ...]
    where: str
    spelled: str
    example: str
    parts: tuple[str, ...]


@cache
def projects() -> Mapping[str, Project]:
    """Return every project by name, in the order of ``projects.toml``."""
    return read_toml(dict[str, Project], RECIPES / "projects.toml", RecipeError)


def detect(
    path: Path,
    project: str = "vllm",
    *,
    sandboxed: Sandboxed = Sandboxed.ALWAYS,
) -> SourceTree:
    """Return the tree of a project at ``path``; ``sandboxed`` says how its code may be run.

    Raises UsageError if the path does not exist, SourceError if it is no tree of the project or its
    version is unknown.
    """
    root = path.resolve()
    if project == "vllm" and _is_vllm_package(root):
        if (root.parent / "setup.py").is_file():
            what = f"{root}: is the package inside a source tree"
            raise SourceError(what, hint=f"name {root.parent} instead")

        installed = detect_installed(root.parent, "vllm")
        return replace(installed, sandboxed=sandboxed)

    _check_markers(path, root, projects()[project])
    has_history = (root / ".git").exists()
    kind = "git" if has_history else "archive"
    note = ""
    if project == "nccl":
        # The makefiles say the version, with and without a git history.
        version = _make_version(root)
    elif (metadata := root / "PKG-INFO").is_file():
        version = _sdist_version(metadata)
        is_fork = _metadata_field(metadata, "Summary") == FORK
        kind = "archive" if is_fork else "sdist"
    else:
        version, note = _copy_version(root, has_history=has_history)
    return SourceTree(
        root=root,
        project=project,
        version=version,
        kind=kind,
        sandboxed=sandboxed,
        note=note,
    )


def _check_markers(path: Path, root: Path, project: Project) -> None:
    """Check that a folder is a tree of the project.

    Raises UsageError if nothing is there, SourceError if it is no folder or a marker is missing.
    """
    hint = f"name {project.spelled}"
    if not root.exists():
        raise UsageError(f"{path}: no such directory", hint=hint)
    if not root.is_dir():
        raise SourceError(f"{path}: is not a directory", hint=hint)

    for marker in project.markers:
        if not (root / marker).is_file():
            raise SourceError(
                f"{path}: not a source tree of {project.title}: {marker} is missing",
                why="the path is one level too high or too low, or the tree is incomplete",
                hint=f"name the folder that holds {project.where}",
            )


def _sdist_version(metadata: Path) -> Version:
    """Return the version in the PKG-INFO of an sdist of vLLM.

    Raises SourceError if PKG-INFO is not of vLLM, UsageError if the user names another version.
    """
    name = _metadata_field(metadata, "Name")
    if name.lower() != "vllm":
        raise SourceError(f"{metadata}: describes {name or 'nothing'}, not vllm")

    version = _version(_metadata_field(metadata, "Version"), metadata)
    named = os.environ.get(VERSION_VARIABLE, str(version))
    if _version(named, metadata) != version:
        raise UsageError(
            f"{metadata}: is of {version}, not of {named}",
            why="a version is named for a checkout without one",
            hint=f"leave out --source-version, and unset {VERSION_VARIABLE}",
        )
    return version


def named_release(spec: str, project: str) -> Version | None:
    """Return the version in ``vllm==X.Y.Z``, None if the text names no release of ``project``.

    Raises UsageError if the version is malformed.
    """
    match = _RELEASE.fullmatch(spec)
    if match is None or match["project"].lower() != project:
        return None
    return named_version(match["version"], f"for example {projects()[project].example}")


def project_of(spec: str) -> str:
    """Return the project of ``spec``, which is a release, a folder, an archive or a URL.

    Raises UsageError if neither the name nor the files show the project.
    """
    path = Path(spec)
    name = spec.partition("==")[0].lower()
    if _RELEASE.fullmatch(spec) and name in projects():
        return name

    if path.is_dir() and (project := _project_in(path.resolve())):
        return project

    file_name = path.name.lower()
    candidates = [name for name in projects() if name in file_name]
    if len(candidates) == 1:
        return candidates[0]

    if "://" not in spec and not path.exists():
        hint = guess_release(spec, projects()) or _list_nearest(path)
        raise UsageError(f"{spec}: no such file or folder", hint=hint)

    options = " or ".join(f"--{name}-src" for name in projects())
    raise UsageError(
        f"{spec}: neither its name nor what lies there says whether it is vLLM or NCCL",
        hint=f"name it with {options}",
    )


def _is_vllm_package(root: Path) -> bool:
    return root.name == "vllm" and (root / "__init__.py").is_file()


def _project_in(root: Path) -> str:
    """Return the project whose tree or package is in a folder, "" if none."""
    if _is_vllm_package(root):
        return "vllm"
    for name, project in projects().items():
        if all((root / marker).is_file() for marker in project.markers):
            return name
    return ""


def _list_nearest(path: Path) -> str:
    """Return an ``ls`` command for the nearest existing parent of a path."""
    nearest = next(folder for folder in path.absolute().parents if folder.is_dir())
    return quoted("ls", nearest)


def _make_version(root: Path) -> Version:
    """Return the version of NCCL from version.mk: MAJOR.MINOR.PATCH and SUFFIX, which may be empty.

    PKG_REVISION is left out: it counts the packages of one version, and is 1 in every tag. Raises
    SourceError if a number is missing.
    """
    place = root / "makefiles/version.mk"
    data = read_bytes(place, limit=LARGEST_IN_TREE, hint=RESTORE)
    text = data.decode(errors="replace")
    values = dict(_ASSIGNED.findall(text))
    numbers = []
    for name in ("NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH"):
        number = values.get(name, "")
        if not number.isdecimal():
            raise SourceError(
                f"{place}: {name} is not set to a number",
                why="the file was edited by hand, or cut short",
                hint=RESTORE,
            )
        numbers.append(number)

    release = ".".join(numbers)
    return _version(f"{release}{values.get('NCCL_SUFFIX', '')}", place)


def state_folder(tree: SourceTree) -> Path:
    """Return the folder that holds the ledger of a tree.

    Raises SourceError if an installed package has no .dist-info folder, or several.
    """
    if tree.kind != "installed":
        return tree.root / ".patchkit"
    if tree.project in projects():
        return tree.root / tree.project / ".patchkit"

    # Other packages may have no folder of their name, or several.
    return dist_info(tree) / ".patchkit"


def dist_info(tree: SourceTree) -> Path:
    """Return the .dist-info folder of a package. Raises SourceError if it has none or several."""
    folders = [
        folder
        for folder in sorted(tree.root.glob("*.dist-info"))
        if canonicalize_name(folder.name.partition("-")[0]) == tree.project
    ]

    if len(folders) != 1:
        raise SourceError(
            f"{tree.root}: {len(folders)} folders {tree.project}-*.dist-info, expected 1",
            why="the package was not installed by pip, or its installation is damaged",
            hint=_install_again(tree.project, "X.Y.Z"),
        )
    return folders[0]


def _install_again(name: str, version: object) -> str:
    words = ("pip", "install", "--force-reinstall", "--no-deps", f"{name}=={version}")
    return quoted(*words)


def record_path(tree: SourceTree) -> str:
    """Return the path of the RECORD of an installed package, relative to its tree.

    Raises as ``dist_info`` does.
    """
    return (dist_info(tree) / "RECORD").relative_to(tree.root).as_posix()


def detect_installed(site: Path, name: str) -> SourceTree:
    """Return the tree of a package in a site-packages folder.

    Raises SourceError if it is not installed there, or not by pip.
    """
    # The version is a placeholder: dist_info needs a tree to find the file with the version.
    tree = SourceTree(
        root=site.resolve(),
        project=canonicalize_name(name),
        version=Version("0"),
        kind="installed",
    )
    folder = dist_info(tree)
    metadata = folder / "METADATA"
    version = _version(_metadata_field(metadata, "Version"), metadata)

    if not (folder / "RECORD").is_file():
        raise SourceError(
            f"{folder}: has no RECORD, so pip could not uninstall a patched {name}",
            why="the package was not installed by pip",
            hint=_install_again(name, version),
        )

    return replace(tree, version=version)


def _metadata_field(place: Path, name: str) -> str:
    """Return a header field of PKG-INFO or METADATA, "" if the file or field is missing."""
    if not place.is_file():
        return ""
    data = read_bytes(place, limit=LARGEST_IN_TREE, hint=RESTORE)
    head = data.decode(errors="replace").partition("\n\n")[0]
    match = re.search(rf"^{name}:[ \t]*(.*)$", head, re.MULTILINE)
    return match[1].strip() if match else ""


def _copy_version(root: Path, *, has_history: bool) -> tuple[Version, str]:
    """Return the version of a checkout or of a copy of one, and a note, "" if a tag says it.

    The first of these counts: the version that the user names, the git tag, the version in the
    ledger of an earlier run, the release whose files are most alike. Raises SourceError if none.
    """
    if named := os.environ.get(VERSION_VARIABLE):
        version = _version(named, Path(VERSION_VARIABLE))
        return version, f"the version, {named}, is as it was named"

    try:
        if has_history:
            return _git_version(root), ""
        raise SourceError(
            f"{root}: neither PKG-INFO nor .git tells the version",
            why="this is a copy of the files without their history",
            hint="use the sdist, or name the version with --source-version",
        )
    except SourceError as error:
        untold = error

    # Faults of the ledger are reported later, when all of it is read.
    with contextlib.suppress(PatchkitError, RecordError, KeyError):
        place = root / ".patchkit/ledger.json"
        text = read_text(place, limit=LARGEST_IN_TREE, follow=False)
        ledger = read_json(dict[str, Any], text)
        return _version(str(ledger["version"]), root), ""

    problem = (untold.why or untold.what).splitlines()[0]
    note = f"no tag says the version ({problem})"
    if named := os.environ.get("SETUPTOOLS_SCM_PRETEND_VERSION"):
        version = _version(named, root)
        return version, f"{note}: it is {named}, by SETUPTOOLS_SCM_PRETEND_VERSION"

    release, same, count = _most_alike(root)
    if not same:
        raise untold
    note += f": {same} of {count} files that fixes look at are as in {release}"
    if same == count:
        return Version(release), note
    version = Version(f"{release}.dev0+untagged")
    return version, f"{note}; the code alone decides, --source-version names another"


def _most_alike(root: Path) -> tuple[str, int, int]:
    """Return the release with the largest share of equal files, and the numbers of equal and all.

    Of several releases with the same share, the newest is returned.
    """
    tree = SourceTree(
        root=root,
        project="vllm",
        version=Version("0"),
        kind="archive",
    )

    counts = {}
    for release, files in release_files("vllm").items():
        begins = {path: begin for path, begin in files.items() if begin}
        same = [
            path for path in begins if tree.digest_of(path).startswith(begins[path])
        ]
        counts[release] = (len(same), len(begins))

    best = max(reversed(counts), key=lambda release: truediv(*counts[release]))
    return best, *counts[best]


def _git_version(root: Path) -> Version:
    """Return the version as setuptools-scm does: the tag, or .devN of the next version.

    Raises SourceError if git finds no version tag.
    """
    result = attempt(
        "git",
        "-C",
        root,
        "describe",
        "--tags",
        "--long",
        "--match",
        "v*",
        env=os.environ | NO_FETCH,
    )
    match = _DESCRIBED.fullmatch(result.output.strip())
    if match is None:
        raise SourceError(
            f"{root}: git describe finds no version tag",
            why=result.errors.strip() or f"git {result.trouble}",
            hint=quoted("git", "-C", root, "fetch", "--tags", "--unshallow"),
        )

    tag = _version(match["tag"].removeprefix("v"), root)
    if match["distance"] == "0":
        return tag

    # Like guess-next-dev, setuptools-scm's default: a commit after 0.19.1 is a .devN of 0.19.2.
    *leading, last = tag.release
    following = ".".join(map(str, [*leading, last + 1]))
    if tag.pre:
        letter, number = tag.pre
        following = f"{tag.base_version}{letter}{number + 1}"
    return Version(f"{following}.dev{match['distance']}+g{match['commit']}")


def _version(text: str, place: Path) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise SourceError(f"{place}: {text!r} is not a version") from None
