"""Find what is known of the node, the images and the versions that a file is for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.check.content import FileContent
from patchkit.runtime.envfile.facts import fact_problems
from patchkit.runtime.envfile.header import head_facts
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.target import target_of
from patchkit.runtime.rules.condition import Situation
from patchkit.runtime.rules.releases import release, within
from patchkit.runtime.rules.variables import is_known_vllm
from patchkit.target import targets

# Three numbers at least: v0.11 may be a branch, and 25.11 is a month.
_VERSION = r"v?(?P<version>\d+\.\d+\.\d+(?:\.post\d+|rc\d+|a\d+|b\d+)?(?:\.dev\d+)?)"
_TAG = re.compile(rf"{_VERSION}(?:[-_+].*)?")
_PINNED = re.compile(
    rf"(?<![\w.-])(?P<name>[A-Za-z][\w.-]{{0,40}})(?:\[[\w,-]*\])?==={{0,1}}{_VERSION}"
)
_IMAGE = re.compile(r"(?:\w+_)?IMAGE(?:_\w+)?")
_VARIABLE = re.compile(r"(?:\w+_)?(?P<name>[A-Z]+)_(?:VERSION|TAG|REF|RELEASE|BRANCH)")


@dataclass(frozen=True, slots=True)
class StatedVersion:
    """A version that a file states: ``project`` is vllm, nccl, torch …; ``text`` the place."""

    project: str
    version: str
    line: int
    text: str


@cache
def _said_tables() -> Mapping[str, Any]:
    return read_toml(dict[str, Any], RECIPES / "env" / "said.toml")


@cache
def _upstream_images() -> frozenset[str]:
    table = read_toml(dict[str, dict[str, tuple[str, ...]]], RECIPES / "env" / "images.toml")
    return frozenset(table["vllm"]["upstream"])


def find_image(image: str) -> Mapping[str, str]:
    """Return the row of a container image, given with or without its tag; empty for none."""
    name, _ = _split_image(image)
    rows = _said_tables()["image"]
    return next((row for row in rows if re.fullmatch(row["repository"], name)), {})


def is_server_module(name: str) -> bool:
    """Return whether `python -m NAME` is what `vllm serve` is."""
    return name in _said_tables()["server"]["modules"]


def is_server_flag(name: str) -> bool:
    """Return whether a flag is one of `vllm serve` and of no other server."""
    return name.replace("_", "-") in _said_tables()["server"]["flags"]


def _split_image(image: str) -> tuple[str, str]:
    """Return an image's name and its tag; a colon before a slash is that of a port."""
    name, _, _digest = image.partition("@")
    before, colon, tag = name.rpartition(":")
    return (before, tag) if colon and "/" not in tag else (name, "")


def runs_upstream(content: FileContent, block: int = 0) -> bool | None:
    """Return whether upstream's own vLLM runs in a block; None if the file does not say it."""
    images = content.images_by_block
    return _are_upstream(images.get(block) or images[0])


@cache
def _are_upstream(images: frozenset[str]) -> bool | None:
    names = {_split_image(image)[0].removeprefix("docker.io/") for image in images}
    return names <= _upstream_images() if names else None


def find_versions(text: str, content: FileContent) -> list[StatedVersion]:
    """Return what a file states: tags of images, NAME==VERSION, VLLM_VERSION=…; each one once."""
    found: dict[tuple[str, str], StatedVersion] = {}
    for stated in sorted(_find_stated(text, content), key=lambda stated: stated.line):
        found.setdefault((stated.project, stated.version), stated)
    return [*found.values()]


def _find_stated(text: str, content: FileContent) -> Iterator[StatedVersion]:
    images = [(image.text, image.line) for image in content.images]
    for assignment in (*content.assignments, *content.own):
        if _IMAGE.fullmatch(assignment.name) and ":" in assignment.value:
            images.append((assignment.value, assignment.line))
        name, tag = _VARIABLE.fullmatch(assignment.name), _TAG.fullmatch(assignment.value)
        project = _said_tables()["variables"].get(name["name"]) if name else None
        if tag and project:
            place = f"{assignment.name}={assignment.value}"
            yield StatedVersion(project, tag["version"], assignment.line, place)
    for image, line in images:
        row, tag = find_image(image), _TAG.fullmatch(_split_image(image)[1])
        if row.get("version") and tag and within(tag["version"], row["versions"]):
            yield StatedVersion(row["version"], tag["version"], line, image)
    for number, row_text in enumerate(text.split("\n") if "==" in text else (), 1):
        for match in _PINNED.finditer(row_text.partition("#")[0]):
            name_of = re.sub(r"[-_.]+", "-", match["name"]).lower()
            if project := _said_tables()["distributions"].get(name_of):
                yield StatedVersion(project, match["version"], number, match[0])


DEFAULT_TARGET = "gb10"
_FACTS = ("role", "topology", "executor", "vllm", "nccl", "nodes", "quantization")
_SOFTWARE = ("vllm", "nccl", "torch", "triton")
# With one GPU in a node, more than one of these takes several nodes.
_COUNTS = ("--nnodes", "--tensor-parallel-size", "--pipeline-parallel-size")
_ONE_GPU = ("gb10", "thor")


@dataclass(frozen=True, kw_only=True)
class CheckedText:
    """What is checked: a text with its name, what it says, and what is known of its machine.

    ``text`` is empty for what runs; ``mode`` are a file's rights. ``host`` is the machine that is
    to use it, None for any; ``home`` the folder of its vLLM, whose names count instead of those of
    the version in ``situation``.
    """

    where: str
    content: FileContent
    text: str = ""
    mode: int | None = None
    versions: Sequence[StatedVersion] = ()
    situation: Situation = field(default_factory=dict)
    host: Host | None = None
    home: Path | None = None


def add_situation(
    checked: CheckedText, host: Host | None, asked: Mapping[str, str | None]
) -> CheckedText:
    """Add what is asked for, else said by the file's first line or its text, else found here.

    The target is a GB10 unless one is asked for or this host is another known device. A file that
    names a container image does not run with this host's software, and one that names several
    versions of a project is checked against any. Raises UsageError for a version that is none.
    """
    text, content = checked.text, checked.content
    versions = [*find_versions(text, content), *checked.versions]
    for name in _SOFTWARE:
        if version := asked.get(name):
            release(version)  # raises for what is no version, before anything is compared
    found: dict[str, str] = {}
    if host:
        # An unknown device, as a laptop is one, says nothing of the machine that the file is for.
        target = target_of(host)
        found["target"] = target if target in targets() else ""
        found["topology"] = "roce" if any(device.active for device in host.rdma) else ""
        found |= {} if content.images else host.versions
    facts = head_facts(text)
    wrong = fact_problems(facts)
    for name in _SOFTWARE:
        stated = [version.version for version in versions if version.project == name]
        # Other images have tags of their own numbers.
        is_known = name != "vllm" or (stated and is_known_vllm(stated[0]))
        if stated:
            found[name] = stated[0] if len(stated) == 1 and is_known else ""
    head = {name: facts[name] for name in _FACTS if name in facts and name not in wrong}
    known = {"target": DEFAULT_TARGET}
    for source in (found, head, asked):
        known |= {name: value for name, value in source.items() if value}
    # The file itself may tell of several nodes.
    counts = _COUNTS if known["target"] in _ONE_GPU else _COUNTS[:1]
    for command in content.commands:
        values = [flag.value[:9] for flag in command.flags if flag.name in counts]
        joins = command.program == "ray start" and command.find_flag("--address")
        if joins or any(value.isdecimal() and int(value) > 1 for value in values):
            known.setdefault("role", "head")
    home = host.vllm_home(known.get("vllm", "")) if host else None
    return replace(checked, versions=versions, situation=known, host=host, home=home)
