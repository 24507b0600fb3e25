"""Find what is known of the node, the images and the versions that a file is for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from patchkit.records import RECIPES, read_toml
from patchkit.runtime.check.content import FileContent, is_literal
from patchkit.runtime.envfile.header import fact_problems, head_facts
from patchkit.runtime.host.hardware import target_of
from patchkit.runtime.host.host import Host
from patchkit.runtime.rules.releases import release, within
from patchkit.runtime.rules.rule import Situation
from patchkit.runtime.rules.variables import vllm_table
from patchkit.target import targets

DEFAULT_TARGET = "gb10"
# Three numbers at least: v0.11 may be a branch, and 25.11 is a month.
_VERSION = r"v?(?P<version>\d+\.\d+\.\d+(?:\.post\d+|rc\d+|a\d+|b\d+)?(?:\.dev\d+)?)"
_TAG = re.compile(rf"{_VERSION}(?:[-_+].*)?")
_PINNED = re.compile(
    rf"(?<![\w.-])(?P<name>[A-Za-z][\w.-]{{0,40}})(?:\[[\w,-]*\])?==={{0,1}}{_VERSION}"
)
_FACTS = ("role", "topology", "executor", "vllm", "nccl", "nodes", "quantization")
_SOFTWARE = ("vllm", "nccl", "torch", "triton")
# With one GPU in a node, more than one of these takes several nodes.
_COUNTS = ("--nnodes", "--tensor-parallel-size", "--pipeline-parallel-size")
_ONE_GPU = ("gb10", "thor")


@dataclass(frozen=True, slots=True)
class StatedVersion:
    """A version that a file states: ``project`` is vllm, nccl, torch …; ``text`` the place."""

    project: str
    version: str
    line: int
    text: str


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

    @cached_property
    def upstream_by_block(self) -> Mapping[int, bool]:
        """Whether upstream's own vLLM runs in a block, where its image is known; 0: in the file."""
        found: dict[int, bool] = {}
        upstream = image_table()["server"]["upstream"]
        for image in self.content.images:
            name = find_image(image.text)[0].removeprefix("docker.io/")
            for block in {image.block, *([0] if is_literal(image.text) else [])}:
                found[block] = found.get(block, True) and name in upstream
        return found

    def runs_upstream(self, block: int = 0) -> bool | None:
        """Return whether upstream's own vLLM runs in a block; None if the file does not say it."""
        return self.upstream_by_block.get(block, self.upstream_by_block.get(0))


@cache
def image_table() -> Mapping[str, Any]:
    """Return said.toml: how files say versions, and by what `vllm serve` is known."""
    return read_toml(dict[str, Any], RECIPES / "env" / "said.toml")


def find_image(image: str) -> tuple[str, str, Mapping[str, str]]:
    """Return an image's name, its tag and its row; a colon before a slash is that of a port."""
    name, _, _digest = image.partition("@")
    before, colon, tag = name.rpartition(":")
    name, tag = (before, tag) if colon and "/" not in tag else (name, "")
    rows = image_table()["image"]
    return name, tag, next((row for row in rows if re.fullmatch(row["repository"], name)), {})


def _find_versions(text: str, content: FileContent) -> Iterator[StatedVersion]:
    """Yield what a file states: tags of images, and NAME==VERSION."""
    for image in content.images:
        _name, text_of_tag, row = find_image(image.text)
        tag = _TAG.fullmatch(text_of_tag)
        if row.get("version") and tag and within(tag["version"], row["versions"]):
            yield StatedVersion(row["version"], tag["version"], image.line, image.text)
    for number, row_text in enumerate(text.split("\n") if "==" in text else (), 1):
        for match in _PINNED.finditer(row_text.partition("#")[0]):
            distribution = re.sub(r"[-_.]+", "-", match["name"]).lower()
            if project := image_table()["distributions"].get(distribution):
                yield StatedVersion(project, match["version"], number, match[0])


def add_situation(
    checked: CheckedText, host: Host | None, asked: Mapping[str, str | None]
) -> CheckedText:
    """Add what is asked for, else said by the file's first line or its text, else found here.

    The target is a GB10 unless one is asked for or this host is another known device. A file that
    names a container image does not run with this host's software, and one that names several
    versions of a project is checked against any. Raises UsageError for a version that is none.
    """
    content = checked.content
    stated: dict[tuple[str, str], StatedVersion] = {}
    for version in sorted(_find_versions(checked.text, content), key=lambda row: row.line):
        stated.setdefault((version.project, version.version), version)
    versions = [*stated.values(), *checked.versions]
    for name in _SOFTWARE:
        release(asked.get(name) or "0")  # raises for what is no version, before any is compared
    found: dict[str, str] = {}
    if host:
        # An unknown device, as a laptop is one, says nothing of the machine that the file is for.
        target = target_of(host)
        found["target"] = target if target in targets() else ""
        found["topology"] = "roce" if any(device.active for device in host.rdma) else ""
        found |= {} if content.images else host.versions
    for name in _SOFTWARE:
        known = [version.version for version in versions if version.project == name]
        if known:
            # Other images have tags of their own numbers.
            newest = release(vllm_table().newest)
            is_vllm = vllm_table().oldest <= release(known[0]) <= newest
            is_sure = len(known) == 1 and (name != "vllm" or is_vllm)
            found[name] = known[0] if is_sure else ""
    facts = head_facts(checked.text)
    wrong = fact_problems(facts)
    head = {name: facts[name] for name in _FACTS if name in facts and name not in wrong}
    situation = {"target": DEFAULT_TARGET}
    for source in (found, head, asked):
        situation |= {name: value for name, value in source.items() if value}
    if _starts_several_nodes(content, situation["target"]):
        situation.setdefault("role", "head")
    home = host.vllm_home(situation.get("vllm", "")) if host else None
    return replace(checked, versions=versions, situation=situation, host=host, home=home)


def _starts_several_nodes(content: FileContent, target: str) -> bool:
    counts = _COUNTS if target in _ONE_GPU else _COUNTS[:1]
    for command in content.commands:
        values = [flag.value[:9] for flag in command.flags if flag.name in counts]
        joins = command.program == "ray start" and command.find_flag("--address")
        if joins or any(value.isdecimal() and int(value) > 1 for value in values):
            return True
    return False
