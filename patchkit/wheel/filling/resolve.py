"""Resolve which wheels an installation on a node consists of."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

from patchkit.errors import SourceError, UsageError
from patchkit.versions import ExactPin
from patchkit.wheel.file.name import WheelName, wheel_name
from patchkit.wheel.filling.node_packages import NodePackages
from patchkit.wheel.filling.node_platform import NodePlatform
from patchkit.wheel.filling.uv import WheelSources, compile_requirements

_LOCK = ("--format=pylock.toml", "--generate-hashes")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedWheel:
    """A wheel that was chosen, and where it is; ``size`` in bytes, 0 if the index does not say."""

    name: WheelName
    sha256: str
    url: str
    size: int


def resolve(
    given: Iterable[Path],
    also: Sequence[str],
    node: NodePlatform,
    sources: WheelSources,
    constraints: Iterable[str] = (),
    overrides: Iterable[ExactPin] = (),
    preferred: NodePackages | None = None,
) -> tuple[LockedWheel, ...]:
    """Return every wheel, by file name, that a node needs for the ``given`` ones and ``also``.

    The given ones are taken before any of their projects elsewhere; ``also`` are requirements,
    ``overrides`` replace what wheels require, and ``preferred`` versions are kept where they fit.
    Raises as ``compile_requirements`` does.
    """
    for each in also:
        if each.startswith("-") or not each.isprintable():
            raise UsageError(f"--with takes a requirement such as 'ray>=2.40', not {each!r}")
    ours = {wheel_name(wheel.name).project: wheel.as_uri() for wheel in given}
    named = {project: f"{project} @ {url}" for project, url in ours.items()}
    text = compile_requirements(
        [*named.values(), *also],
        node,
        sources,
        *_LOCK,
        constraints=constraints,
        # An override replaces what we ask for as well: it has to name the wheel that is given.
        overrides=[named.get(pin.project, str(pin)) for pin in overrides],
        preferred=preferred,
    )
    rows = tomllib.loads(text)["packages"]
    ranks = node.ranks()
    found = [_chosen(row, ranks) for row in rows if row["name"] not in ours]
    return tuple(sorted(found, key=lambda wheel: wheel.name.filename))


def requirements_of(
    wheel: LockedWheel,
    node: NodePlatform,
    sources: WheelSources,
    overrides: Iterable[ExactPin] = (),
) -> tuple[str, ...]:
    """Return the projects that a wheel requires on that node. Raises as ``resolve`` does."""
    options = ("--format=requirements.txt", "--annotation-style=line")
    text = compile_requirements(
        [wheel.name.pinned], node, sources, *options, overrides=map(str, overrides)
    )
    pinned = (line.partition("==") for line in text.splitlines() if "==" in line)
    return tuple(
        project
        for project, _, rest in pinned
        # uv's annotation in one line: `sympy==1.13.3  # via torch, other`.
        if wheel.name.project in rest.partition("# via ")[2].split(", ")
    )


def _chosen(row: Mapping[str, Any], ranks: Mapping[Tag, int]) -> LockedWheel:
    """Return the file of a package that an installer takes. Raises SourceError if there is none."""
    fitting = []
    # pylock.toml (PEP 751): `archive` is the file of a requirement that names a URL.
    for file in row.get("wheels", [row.get("archive", {})]):
        url = file.get("url") or Path(file.get("path", "")).absolute().as_uri()
        filename = unquote(urlsplit(url).path.rpartition("/")[2])
        sha256 = file.get("hashes", {}).get("sha256", "")
        if not filename.endswith(".whl") or not _SHA256.fullmatch(sha256):
            continue
        *_, build, tags = parse_wheel_filename(filename)
        if tags & ranks.keys():
            rank = min(ranks[tag] for tag in tags & ranks.keys())
            size = int(file.get("size", 0))
            name = wheel_name(filename)
            wheel = LockedWheel(name=name, sha256=sha256, url=url, size=size)
            # As pip chooses: the best tag, and of equals the highest build number.
            fitting.append(((-rank, build), wheel))
    if not fitting:
        raise SourceError(
            f"{row['name']} {row.get('version', '')}: there is no wheel with a sha256",
            hint="build a wheel of it, and name its folder with --find-links",
        )
    return max(fitting, key=lambda each: each[0])[1]
