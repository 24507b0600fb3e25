"""Resolve requirements for a node with uv, which can do so on a machine of another kind.

uv gets the index, the credentials and the certificates that pip is configured with.
"""

import contextlib
import os
import re
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import (
    Tag,
    compatible_tags,
    cpython_tags,
    create_compatible_tags_selector,
    parse_tag,
)
from uv import find_uv_bin

from patchkit.errors import PatchkitError, SourceError, StorageError, UsageError
from patchkit.follow import Completed
from patchkit.frozen import Fields, Values, frozen
from patchkit.process import attempt
from patchkit.records import RECIPES, read_toml
from patchkit.source.fetch import cache_dir, pip_settings
from patchkit.source.releases import ExactPin
from patchkit.wheel.file.wheelfile import WheelName
from patchkit.wheel.wheelhouse.storage import Kind, ManifestEntry

_UV = read_toml(Fields, RECIPES / "wheel" / "uv.toml")
# The frame that uv draws in front of each line of an error, and the labels "error: ", "cause: ".
_FRAME = r"^[^\w`]*(?:(?:error|cause): )?"
_PASSWORD = re.compile(r"(?<=://)[^/@\s]+@")
_SHOWN = 12  # lines of uv's output that an error message shows


_LEAST_GLIBC = 5  # the minor version of manylinux1
# Names of platform tags before PEP 600. For aarch64 only the first one exists.
_OLD_NAMES = ("manylinux2014", "manylinux2010", "manylinux1")


@frozen
class NodePlatform:
    """What wheels a node can install: its CPU ``x86_64``, Python ``3.12`` and glibc ``2.39``."""

    machine: str
    python: str
    glibc: str

    def __str__(self) -> str:
        return f"CPython {self.python} on {self.machine} with glibc {self.glibc}"

    @property
    def glibc_minor(self) -> int:
        return int(self.glibc.partition(".")[2])

    def tags(self) -> Iterator[Tag]:
        """Yield each wheel tag that fits, in the order in which an installer prefers them."""
        # Newest glibc first, as in pip's ranking.
        minors = range(self.glibc_minor, _LEAST_GLIBC - 1, -1)
        names = [*(f"manylinux_2_{minor}" for minor in minors), *_OLD_NAMES, "linux"]

        platforms = [f"{name}_{self.machine}" for name in names]
        python = [int(part) for part in self.python.split(".")[:2]]
        interpreter = "cp" + "".join(map(str, python))

        yield from cpython_tags(python, platforms=platforms)
        yield from compatible_tags(python, interpreter, platforms)


@contextlib.contextmanager
def only_metadata(wheels: Iterable[Path]) -> Iterator[Path]:
    """Yield a temporary folder with copies of wheels that hold only .dist-info.

    uv would unpack every file of a complete wheel into its cache.
    """
    with tempfile.TemporaryDirectory() as folder:
        for wheel in wheels:
            small = Path(folder) / wheel.name
            with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(small, "w") as new:
                for name in old.namelist():
                    if ".dist-info/" in name:
                        new.writestr(name, old.read(name))
        yield Path(folder)


def is_offline() -> bool:
    """Return whether pip is configured to take wheels from folders alone: ``PIP_NO_INDEX=1``."""
    return pip_settings().get("no-index", "").lower() in _UV["yes"]


def _uv_environment(folders: Iterable[Path]) -> Values:
    """Return the environment variables for uv, with pip's settings.

    ``folders`` hold wheels beside those that pip's settings name. Variables of the user that begin
    with ``UV_`` are left out, so that all users get equal locks.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("UV_")
    }

    settings = pip_settings()
    for name, variable in _UV["variables"].items():
        if name in settings:
            environment[variable] = settings[name]
    # As pip does, choose the best version of all indexes. uv's default is the first index that has
    # the project.
    if "extra-index-url" in settings:
        environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"

    links = [folder.absolute().as_uri() for folder in folders]
    links += filter(_is_usable_link, settings.get("find-links", "").split())
    environment["UV_FIND_LINKS"] = ",".join(links)
    environment["UV_CACHE_DIR"] = str(cache_dir() / "uv")
    environment["UV_SYSTEM_CERTS"] = "1"  # the system's certificates, as with pip
    return environment


def _is_usable_link(link: str) -> bool:
    """Return whether uv accepts a find-links entry. A missing folder is an error for uv only."""
    scheme, _, path = link.rpartition("://")
    return scheme not in ("", "file") or Path(unquote(path)).exists()


def _uv_error(
    output: str,
    requirements: Sequence[str],
    node: NodePlatform,
) -> PatchkitError:
    """Return the error to raise for a failed run of uv, with its output as the reason.

    Passwords in URLs are removed. The error is a SourceError if there is no solution, else a
    StorageError.
    """
    lines = []
    for line in output.splitlines():
        shown = re.sub(_FRAME, "", _PASSWORD.sub("", line))
        if shown and not line.startswith("warning:"):
            lines.append(shown)
    why = "\n        ".join(lines[:_SHOWN])

    if "No solution found" in output:
        names = [unquote(text).rpartition("/")[2] for text in requirements]
        return SourceError(
            f"there is no set of wheels for {node} that fits together with {', '.join(names)}",
            why=why.partition("\n")[2].strip(),
            hint="take another release or --python-version; build a wheel of what has sources "
            "alone on a node (pip wheel), and name its folder in PIP_FIND_LINKS; if an index has "
            "what was not found, check its credentials in pip's configuration",
        )

    return StorageError(
        "uv cannot resolve what the wheels need",
        why=why,
        hint="check index and credentials in pip's configuration, and the room on the disk; "
        "PIP_NO_INDEX=1 takes wheels from PIP_FIND_LINKS alone",
    )


_SHA256 = r"[0-9a-f]{64}"


@frozen
class LockedWheel(ManifestEntry):
    """A wheel that was chosen, with its URL. Its size is 0 if the index does not tell the size."""

    url: str


def resolve_wheels(
    given: Iterable[Path],
    also: Sequence[str],
    node: NodePlatform,
    folders: Iterable[Path] = (),
    constraints: Iterable[str] = (),
    overrides: Iterable[ExactPin] = (),
) -> tuple[LockedWheel, ...]:
    """Return every wheel that a node needs for the ``given`` wheels and the requirements ``also``.

    The result does not include the given wheels, and is sorted by file name. Wheels come from where
    pip's settings say, and from ``folders``. ``constraints`` limit
    versions but require nothing themselves. ``overrides`` replace every requirement of the same
    project. A wheel is only downloaded if the index does not tell its metadata. Raises SourceError
    if there is no solution or a package has no wheel that fits, UsageError if a text of ``also`` is
    no requirement, StorageError if the index or the disk fails.
    """
    for text in also:
        try:
            Requirement(text)
        except InvalidRequirement:
            raise UsageError(
                f"--with takes a requirement such as 'ray>=2.40', not {text!r}"
            ) from None

    ours = {}
    for wheel in given:
        project = WheelName(wheel.name).project
        ours[project] = f"{project} @ {wheel.as_uri()}"

    requirements = [*ours.values(), *also]
    # An override would also replace our requirement "PROJECT @ URL" of a given wheel. So the
    # override of its project is that requirement itself.
    taken = [ours.get(pin.project, str(pin)) for pin in overrides]
    limits = {"constraints": constraints, "overrides": taken}

    done = _run_uv(requirements, limits, node, folders)
    if done.trouble:
        raise _uv_error(done.errors, requirements, node)

    wheels = [
        _choose_file(row, node)
        for row in tomllib.loads(done.output)["packages"]
        if row["name"] not in ours
    ]
    return tuple(sorted(wheels, key=lambda wheel: wheel.name))


def _run_uv(
    requirements: Sequence[str],
    limits: Mapping[str, Iterable[str]],
    node: NodePlatform,
    folders: Iterable[Path],
) -> Completed:
    """Run `uv pip compile`. ``limits`` maps an option of uv to the lines of the file it takes."""
    minor = max(known for known in _UV["glibc"] if known <= node.glibc_minor)
    options = [
        *_UV["options"],
        f"--python={sys.executable}",
        f"--python-platform={node.machine}-manylinux_2_{minor}",
        f"--python-version={node.python}",
    ]

    if is_offline():
        options.append("--no-index")
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in limits.items():
            place = Path(folder, name)
            place.write_text("\n".join(lines), encoding="utf-8")
            options.append(f"--{name}={place}")
        return attempt(
            find_uv_bin(),
            "pip",
            "compile",
            "-",
            *options,
            input="\n".join(requirements).encode(),
            env=_uv_environment(folders),
            timeout=None,
        )


def _choose_file(row: Fields, node: NodePlatform) -> LockedWheel:
    """Return the wheel of a package that an installer would take on the node.

    ``row`` is the package's entry in pylock.toml. Raises SourceError if no wheel fits.
    """
    # A package that was required by its URL has one `archive` in the place of `wheels` (PEP 751).
    files = row.get("wheels", [row.get("archive", {})])
    wheels = filter(None, (_locked_wheel(file, node) for file in files))

    select_fitting = create_compatible_tags_selector(node.tags())
    fitting = select_fitting((wheel, parse_tag(wheel.name.tag)) for wheel in wheels)
    for wheel in fitting:
        return wheel

    raise SourceError(
        f"{row['name']} {row.get('version', '')}: no wheel that fits the node has a sha256",
        hint="build a wheel of it, and name its folder in PIP_FIND_LINKS",
    )


def _locked_wheel(file: Fields, node: NodePlatform) -> LockedWheel | None:
    """Return the wheel that a file entry of pylock.toml describes.

    Return None if the file is no wheel or has no sha256.
    """
    url = file.get("url") or Path(file.get("path", "")).absolute().as_uri()
    filename = unquote(urlsplit(url).path.rpartition("/")[2])
    sha256 = file.get("hashes", {}).get("sha256", "")

    if not filename.endswith(".whl") or not re.fullmatch(_SHA256, sha256):
        return None
    return LockedWheel(
        name=WheelName(filename),
        sha256=sha256,
        size=int(file.get("size", 0)),
        facts=asdict(node),
        kind=Kind.LOCKED,
        url=url,
    )
