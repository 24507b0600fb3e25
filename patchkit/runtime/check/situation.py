"""Find out which device, versions and role a file is for."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from patchkit.frozen import Values
from patchkit.runtime.check.content import CheckedText, FileContent, StatedVersion
from patchkit.runtime.envfile.env_file import fact_problems, head_facts
from patchkit.runtime.host.host import Host
from patchkit.runtime.rules.releases import (
    read_env_data,
    release,
    variable_table,
    within,
)
from patchkit.target import DEFAULT_TARGET, is_unified, targets

_SOFTWARE = ("vllm", "nccl", "torch", "triton")
_HEADER_FACTS = (
    "role",
    "topology",
    "executor",
    "vllm",
    "nccl",
    "nodes",
    "quantization",
)
# A version has at least three numbers here: v0.11 may be a branch, and 25.11 a month.
_VERSION = r"v?(?P<version>\d+\.\d+\.\d+(?:\.post\d+|rc\d+|a\d+|b\d+)?(?:\.dev\d+)?)"
_TAG = rf"{_VERSION}(?:[-_+].*)?"
_PINNED = (
    rf"(?<![\w.-])(?P<name>[A-Za-z][\w.-]{{0,40}})(?:\[[\w,-]*\])?==={{0,1}}{_VERSION}"
)
_NODE_COUNT = "--nnodes"
_RANK_COUNTS = ("--tensor-parallel-size", "--pipeline-parallel-size")
_RANK_DIGITS = 9


def add_situation(
    checked: CheckedText, host: Host | None, requested: Mapping[str, str | None]
) -> CheckedText:
    """Return the text with its versions, its situation and its host filled in.

    Each fact of the situation has the first value among: the request; the first line of a file that
    patchkit wrote; the versions that the file states; the host. The target is GB10 unless one is
    requested or the host is another known device. If the file names a container image, the versions
    on the host do not count. If the file states several versions of a project, the project's
    version is left open. Raises UsageError if a requested version is malformed.
    """
    for project in _SOFTWARE:
        # Called only since it raises UsageError for a malformed version.
        release(requested.get(project) or "0")

    content = checked.content

    # Each version once, at its first place.
    stated = [*_image_versions(content), *_pinned_versions(checked.text)]
    stated.sort(key=attrgetter("line"), reverse=True)
    first_places = {(row.project, row.version): row for row in stated}
    versions = sorted(first_places.values(), key=attrgetter("line"))

    stated_facts = _judge_versions(versions)
    found_facts = {**_host_facts(host, content), **stated_facts}

    situation = {"target": DEFAULT_TARGET}
    for facts in (found_facts, _header_facts(checked.text), requested):
        situation |= {name: value for name, value in facts.items() if value}

    if _is_of_several_nodes(content, situation["target"]):
        situation.setdefault("role", "head")

    home = host.vllm_home(situation.get("vllm", "")) if host else None
    return replace(
        checked, versions=versions, situation=situation, host=host, home=home
    )


def _image_versions(content: FileContent) -> Iterator[StatedVersion]:
    for image in content.images:
        row = image.row
        tag = re.fullmatch(_TAG, image.tag)

        project = row.get("version")
        if not project or not tag:
            continue

        version = tag["version"]
        if within(version, row["versions"]):
            yield StatedVersion(project, version, image.line, image.text)


def _pinned_versions(text: str) -> Iterator[StatedVersion]:
    """Yield the versions of ``NAME==VERSION`` outside of comments."""
    projects = read_env_data("said")["distributions"]
    for number, line in enumerate(text.split("\n"), 1):
        for match in re.finditer(_PINNED, line.partition("#")[0]):
            distribution = re.sub(r"[-_.]+", "-", match["name"]).lower()

            if project := projects.get(distribution):
                yield StatedVersion(project, match["version"], number, match[0])


def _judge_versions(versions: Sequence[StatedVersion]) -> Values:
    """Return project → the version that a file states, "" if it states several.

    A version of vLLM outside the releases that patchkit knows also becomes "".
    """
    facts: dict[str, str] = {}
    for stated in versions:
        if stated.project in _SOFTWARE:
            is_second = stated.project in facts
            facts[stated.project] = "" if is_second else stated.version

    # An image's tag may be the version of the image, not a release of vLLM.
    table = variable_table("vllm")
    numbers = release(facts.get("vllm") or "0")
    is_release = table.oldest <= numbers <= release(table.newest)
    if "vllm" in facts and not is_release:
        facts["vllm"] = ""
    return facts


def _host_facts(host: Host | None, content: FileContent) -> Values:
    if host is None:
        return {}

    facts = {} if content.images else {**host.versions}
    # A file is hardly for an unknown device, such as the laptop on which it is checked.
    if host.target in targets():
        facts["target"] = host.target

    if any(device.active for device in host.rdma):
        facts["topology"] = "roce"

    return facts


def _header_facts(text: str) -> Values:
    """Return the valid facts in the first line of a file of patchkit, {} for other files."""
    facts = head_facts(text)
    wrong = fact_problems(facts)

    return {
        name: facts[name]
        for name in _HEADER_FACTS
        if name in facts and name not in wrong
    }


def _is_of_several_nodes(content: FileContent, target: str) -> bool:
    """Return whether a flag requests several nodes.

    If the target has one GPU per node, in its CPU's memory, flags for several ranks count, too.
    """
    counting_flags = {_NODE_COUNT}
    if is_unified(target):
        counting_flags.update(_RANK_COUNTS)

    for flag in content.flags:
        count = flag.value[:_RANK_DIGITS]
        if flag.name in counting_flags and count.isdecimal() and int(count) > 1:
            return True

    return False
