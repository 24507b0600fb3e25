"""Detect the kind of a tree (sources, a git checkout, an installed package) and its version."""

import contextlib
import os
import re
from dataclasses import replace
from operator import truediv
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from patchkit.errors import PatchkitError, SourceError, UsageError
from patchkit.frozen import Fields
from patchkit.process import attempt
from patchkit.quoting import quoted
from patchkit.reading import LARGEST_IN_TREE, read_bytes, read_text
from patchkit.records import RecordError, read_json
from patchkit.source.git import NO_FETCH
from patchkit.source.project import (
    Project,
    VersionFile,
    describe_sources,
    example,
    first_example,
    project_named,
    projects,
)
from patchkit.source.releases import named_version, release_files
from patchkit.source.tree import RESTORE, Sandboxed, SourceTree

# The Summary in PKG-INFO that a build writes into its copy of a fork, since that has no history.
FORK = "a fork, which patchkit copied"
# The output of git describe --long: v0.19.1-12-gabc1234, with 0 instead of 12 on the tag itself.
_DESCRIBED = r"(?P<tag>.+)-(?P<distance>\d+)-g(?P<commit>[0-9a-f]+)"
_ANY_PROJECT = "SETUPTOOLS_SCM_PRETEND_VERSION"
_RELEASE = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^/]+)")


def detect(
    path: Path,
    project: str,
    *,
    sandboxed: Sandboxed = Sandboxed.ALWAYS,
) -> SourceTree:
    """Return the tree of a project at ``path``; ``sandboxed`` says how its code may be run.

    Raises UsageError if the path does not exist, or if the user names another version than the
    sdist has; SourceError if it is no tree of the project or its version is unknown.
    """
    root = path.resolve()
    facts = projects()[project]
    if _is_package(root, facts):
        if _has_markers(root.parent, facts):
            what = f"{root}: is the package inside a source tree"
            raise SourceError(what, hint=f"name {root.parent} instead")

        installed = detect_installed(root.parent, project)
        return replace(installed, sandboxed=sandboxed)

    _check_markers(path, root, project)
    has_history = (root / ".git").exists()
    kind = "git" if has_history else "archive"
    note = ""
    if facts.version is not None:
        # The project has a file that tells the version, in checkouts and in archives.
        version = _read_version(root, facts.version)
    elif (metadata := root / "PKG-INFO").is_file():
        version = _sdist_version(metadata, facts)
        is_fork = _metadata_field(metadata, "Summary") == FORK
        kind = "archive" if is_fork else "sdist"
    else:
        version, note = _copy_version(root, project, has_history=has_history)
    return SourceTree(
        root=root,
        project=project,
        version=version,
        kind=kind,
        sandboxed=sandboxed,
        note=note,
    )


def _check_markers(path: Path, root: Path, project: str) -> None:
    """Raise an error unless a folder is a tree of the project.

    It is a UsageError if the path does not exist, and a SourceError if it is no folder or a marker
    is missing.
    """
    facts = projects()[project]
    hint = f"name {describe_sources(project)}"
    if not root.exists():
        raise UsageError(f"{path}: no such directory", hint=hint)
    if not root.is_dir():
        raise SourceError(f"{path}: is not a directory", hint=hint)

    for marker in facts.markers:
        if not (root / marker).is_file():
            raise SourceError(
                f"{path}: not a source tree of {facts.title}: {marker} is missing",
                why="the path is one level too high or too low, or the tree is incomplete",
                hint=f"name the folder that holds {' and '.join(facts.markers[:2])}",
            )


def _sdist_version(metadata: Path, project: Project) -> Version:
    """Return the version in the PKG-INFO of an sdist.

    Raises SourceError if the sdist is of another project, UsageError if the user names another
    version by a variable or an option.
    """
    name = _metadata_field(metadata, "Name")
    if canonicalize_name(name) != project.distribution:
        what = f"describes {name or 'nothing'}, not {project.distribution}"
        raise SourceError(f"{metadata}: {what}")

    version = _version(_metadata_field(metadata, "Version"), metadata)
    variable = project.version_variable
    named = os.environ.get(variable, str(version))
    if _version(named, metadata) != version:
        raise UsageError(
            f"{metadata}: is of {version}, not of {named}",
            why="a version is named for a checkout without one",
            hint=f"leave out --source-version, and unset {variable}",
        )
    return version


def named_release(spec: str, project: str) -> Version | None:
    """Return the version in ``NAME==X.Y.Z``, None if the text names no release of ``project``.

    Raises UsageError if the version is malformed.
    """
    match = _RELEASE.fullmatch(spec)
    if match is None or project_named(match["name"]) != project:
        return None
    return named_version(match["version"], f"for example {example(project)}")


def project_of(spec: str) -> str:
    """Return the project of ``spec``, which is a release, a folder, an archive or a URL.

    Raises UsageError if neither the name nor the files show the project.
    """
    path = Path(spec)
    release = _RELEASE.fullmatch(spec)
    if release and (project := project_named(release["name"])):
        return project

    if path.is_dir() and (project := _project_in(path.resolve())):
        return project

    # The file of a distribution may be named with underscores: flashinfer_python-0.6.13.tar.gz.
    file_name = path.name.lower()
    candidates = [name for name in projects() if name in file_name]
    if len(candidates) == 1:
        return candidates[0]

    if "://" not in spec and not path.exists():
        hint = _list_nearest(path)
        if release:
            hint = f"known are {', '.join(projects())}; --recipes adds others"
        what = f"{spec}: no such file, folder or release such as {first_example()}"
        raise UsageError(what, hint=hint)

    titles = " or ".join(project.title for project in projects().values())
    options = " or ".join(f"--{name}-src" for name in projects())
    raise UsageError(
        f"{spec}: neither its name nor what lies there says whether it is {titles}",
        hint=f"name it with {options}; --recipes names a folder of other projects",
    )


def _is_package(root: Path, project: Project) -> bool:
    return root.name == project.package and (root / "__init__.py").is_file()


def _has_markers(root: Path, project: Project) -> bool:
    return all((root / marker).is_file() for marker in project.markers)


def _project_in(root: Path) -> str:
    """Return the project whose tree or package a folder is, "" if it is none."""
    for name, project in projects().items():
        if _is_package(root, project) or _has_markers(root, project):
            return name
    return ""


def _list_nearest(path: Path) -> str:
    """Return the command that lists the nearest existing parent of a path."""
    nearest = next(folder for folder in path.absolute().parents if folder.is_dir())
    return quoted("ls", nearest)


def _read_version(root: Path, file: VersionFile) -> Version:
    """Return the version that a file of the tree tells. Raises SourceError if there is none."""
    place = root / file.path
    data = read_bytes(place, limit=LARGEST_IN_TREE, hint=RESTORE)
    text = data.decode(errors="replace")

    numbers = []
    for pattern in file.numbers:
        match = re.search(pattern, text, re.MULTILINE)
        if match is None:
            raise SourceError(
                f"{place}: does not tell the version: nothing is like {pattern!r}",
                why="the file was edited by hand, or cut short",
                hint=RESTORE,
            )
        numbers.append(match[1])

    suffix = re.search(file.suffix, text, re.MULTILINE) if file.suffix else None
    return _version(".".join(numbers) + (suffix[1] if suffix else ""), place)


def state_folder(tree: SourceTree) -> Path:
    """Return the folder that holds the ledger of a tree.

    Raises SourceError if an installed package has no .dist-info folder, or several.
    """
    if tree.kind != "installed":
        return tree.root / ".patchkit"
    if project := projects().get(tree.project):
        return tree.root / project.package / ".patchkit"

    # A package that is no project of ours may have no folder of its name, or several.
    return dist_info(tree.root, tree.project) / ".patchkit"


def dist_info(root: Path, package: str) -> Path:
    """Return the .dist-info folder of a package, or of a project, in the environment ``root``.

    Raises SourceError if it has none, or several.
    """
    project = projects().get(package)
    name = project.distribution if project else package
    folders = [
        folder
        for folder in sorted(root.glob("*.dist-info"))
        if canonicalize_name(folder.name.partition("-")[0]) == name
    ]

    if len(folders) != 1:
        raise SourceError(
            f"{root}: {len(folders)} folders {name}-*.dist-info, expected 1",
            why="the package was not installed by pip, or its installation is damaged",
            hint=_install_again(name, "X.Y.Z"),
        )
    return folders[0]


def _install_again(name: str, version: object) -> str:
    words = ("pip", "install", "--force-reinstall", "--no-deps", f"{name}=={version}")
    return quoted(*words)


def record_path(tree: SourceTree) -> str:
    """Return the path of the RECORD of an installed package, relative to its tree.

    Raises as ``dist_info`` does.
    """
    return f"{dist_info(tree.root, tree.project).name}/RECORD"


def detect_installed(site: Path, name: str) -> SourceTree:
    """Return the tree of an installed package in the site-packages folder ``site``.

    ``name`` is the name of the package or of a project. Raises SourceError if it is not installed
    there, or not by pip.
    """
    root = site.resolve()
    project = canonicalize_name(name)
    folder = dist_info(root, project)
    metadata = folder / "METADATA"
    version = _version(_metadata_field(metadata, "Version"), metadata)

    if not (folder / "RECORD").is_file():
        raise SourceError(
            f"{folder}: has no RECORD, so pip could not uninstall a patched {name}",
            why="the package was not installed by pip",
            hint=_install_again(name, version),
        )

    return SourceTree(root=root, project=project, version=version, kind="installed")


def _metadata_field(place: Path, name: str) -> str:
    """Return a header field of PKG-INFO or METADATA, "" if the file or field is missing."""
    if not place.is_file():
        return ""
    data = read_bytes(place, limit=LARGEST_IN_TREE, hint=RESTORE)
    head = data.decode(errors="replace").partition("\n\n")[0]
    match = re.search(rf"^{name}:[ \t]*(.*)$", head, re.MULTILINE)
    return match[1].strip() if match else ""


def _copy_version(
    root: Path, project: str, *, has_history: bool
) -> tuple[Version, str]:
    """Return the version of a checkout, or of a copy without history, and a note on it.

    The first of these decides: the version that the user names, the git tag, the version in the
    ledger of an earlier run, the release whose files are most alike. The note is "" for a tag and a
    ledger. Raises SourceError if none of these tells it.
    """
    # setuptools-scm, too, takes these before any tag.
    for variable in (projects()[project].version_variable, _ANY_PROJECT):
        if named := os.environ.get(variable):
            version = _version(named, Path(variable))
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

    # A malformed ledger is skipped here, and reported later, when all of it is read.
    with contextlib.suppress(PatchkitError, RecordError, KeyError):
        place = root / ".patchkit/ledger.json"
        text = read_text(place, limit=LARGEST_IN_TREE, follow=False)
        ledger = read_json(Fields, text)
        return _version(str(ledger["version"]), root), ""

    release, same, count = _most_alike(root, project)
    if not same:
        raise untold
    problem = (untold.why or untold.what).splitlines()[0]
    note = (
        f"no tag says the version ({problem}): "
        f"{same} of {count} files that fixes look at are as in {release}"
    )
    if same == count:
        return Version(release), note
    version = Version(f"{release}.dev0+untagged")
    return version, f"{note}; the code alone decides, --source-version names another"


def _most_alike(root: Path, project: str) -> tuple[str, int, int]:
    """Return the release that has the largest share of files in common with a tree.

    Also return the number of these files, and of all files of the release that fixes look at. Of
    several releases with the same share, the newest counts. The release is "" if no file is equal.
    """
    tree = SourceTree(
        root=root,
        project=project,
        version=Version("0"),
        kind="archive",
    )

    counts = {"": (0, 1)}
    for release, files in release_files(project).items():
        begins = {path: begin for path, begin in files.items() if begin}
        same = [
            path for path in begins if tree.digest_of(path).startswith(begins[path])
        ]
        counts[release] = (len(same), len(begins))

    best = max(reversed(counts), key=lambda release: truediv(*counts[release]))
    return best, *counts[best]


def _git_version(root: Path) -> Version:
    """Return the version that setuptools-scm would find: the tag, or .devN of the next version.

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
    match = re.fullmatch(_DESCRIBED, result.output.strip())
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
