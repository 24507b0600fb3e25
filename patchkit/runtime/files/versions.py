"""Know images and servers, and the versions that a file states: recipes/env/said.toml."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.files.content import Assignment, CommandLine, SaidVersion, Word
from patchkit.runtime.rules.releases import within

# Three numbers at least: v0.11 may be a branch, and 25.11 is a month.
_VERSION = r"v?(?P<version>\d+\.\d+\.\d+(?:\.post\d+|rc\d+|a\d+|b\d+)?(?:\.dev\d+)?)"
_TAG = re.compile(rf"{_VERSION}(?:[-_+].*)?")
_PINNED = re.compile(rf"(?P<name>[A-Za-z0-9_.-]+?)(?:\[[^\]]*\])?\s*===?\s*{_VERSION}(?:\+.*)?")
_WHEEL = re.compile(rf"(?:.*/)?(?P<name>[A-Za-z0-9_.]+)-{_VERSION}(?:\+|%2B|-).*\.whl(?:[?#].*)?")
_REPOSITORY = re.compile(
    r".*(?:://|@)\S*/(?P<name>[\w.-]+?)(?:\.git)?/?(?:@(?P<reference>[^#\s]+))?(?:#.*)?"
)
_IMAGE = re.compile(r"(?:\w+_)?IMAGE(?:_\w+)?")
_VARIABLE = re.compile(r"(?:\w+_)?(?P<name>[A-Z]+)_(?:VERSION|TAG|REF|RELEASE|BRANCH)")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownImage:
    """A pattern of images: the project whose version the tag is, and what the entrypoint runs."""

    repository: str
    version: str
    versions: str
    program: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    image: tuple[KnownImage, ...]
    distributions: Mapping[str, str]
    repositories: Mapping[str, str]
    variables: Mapping[str, str]
    server: Mapping[str, tuple[str, ...]]


@cache
def _said() -> _Said:
    return read_toml(_Said, RECIPES / "env" / "said.toml")


def known_image(image: str) -> KnownImage | None:
    """Return what is known of a container image, given with or without its tag."""
    repository, _ = _parted(image)
    return next((row for row in _said().image if re.fullmatch(row.repository, repository)), None)


def is_server_module(name: str) -> bool:
    """Return whether `python -m NAME` is what `vllm serve` is."""
    return name in _said().server["modules"]


def is_server_flag(name: str) -> bool:
    """Return whether a flag is one of `vllm serve` and of no other server."""
    return name.replace("_", "-") in _said().server["flags"]


def named_image(assigned: Assignment) -> Word | None:
    """Return the image that a variable such as VLLM_IMAGE names, if it is one that is known."""
    is_image = _IMAGE.fullmatch(assigned.name) and assigned.literal and ":" in assigned.value
    if not is_image or known_image(assigned.value) is None:
        return None
    return Word(assigned.value, assigned.line, default=assigned.default)


def image_version(image: Word) -> SaidVersion | None:
    """Return the version that the tag of an image states."""
    row = known_image(image.text)
    match = _TAG.fullmatch(_parted(image.text)[1])
    if row is None or not row.version or match is None:
        return None
    if not within(match["version"], row.versions):
        return None
    return SaidVersion(row.version, match["version"], image.line, image.text)


def requirement_versions(command: CommandLine) -> Iterator[SaidVersion]:
    """Yield what `pip install` and `git clone --branch` state."""
    if command.program == "pip install":
        for word in command.words:
            yield from _requirement(word)
    elif command.program == "git clone":
        branch = command.flag("--branch") or command.flag("-b")
        for word in command.words if branch else ():
            found = _REPOSITORY.fullmatch(word.text)
            project = _said().repositories.get(found["name"]) if found else None
            if branch and project and (match := _TAG.fullmatch(branch.value)):
                yield SaidVersion(project, match["version"], branch.line, branch.value)


def _requirement(word: Word) -> Iterator[SaidVersion]:
    match = _PINNED.match(word.text) or _WHEEL.fullmatch(word.text)
    if match:
        name = re.sub(r"[-_.]+", "-", match["name"]).lower()
        if project := _said().distributions.get(name):
            yield SaidVersion(project, match["version"], word.line, word.text)
        return
    found = _REPOSITORY.fullmatch(word.text)
    project = _said().repositories.get(found["name"]) if found else None
    if found and project and (tag := _TAG.fullmatch(found["reference"] or "")):
        yield SaidVersion(project, tag["version"], word.line, word.text)


def variable_version(assigned: Assignment) -> SaidVersion | None:
    """Return the version that a variable such as VLLM_VERSION states."""
    name, value = _VARIABLE.fullmatch(assigned.name), _TAG.fullmatch(assigned.value)
    project = _said().variables.get(name["name"]) if name else None
    if value is None or not project:
        return None
    text = f"{assigned.name}={assigned.value}"
    return SaidVersion(project, value["version"], assigned.line, text)


def _parted(image: str) -> tuple[str, str]:
    """Return an image's name and its tag; a colon before a slash is that of a port."""
    name, _, _digest = image.partition("@")
    before, colon, tag = name.rpartition(":")
    return (before, tag) if colon and "/" not in tag else (name, "")
