"""Writing the files in ``recipes/vllm/requirements``: for the maintainer of the recipe.

What a set of versions is comes from any resolver; its hashes come from the configured index. Only
wheels that the supported machines can use are taken:

    python -m patchkit.wheel.vllm.lock_requirements recipes/vllm/requirements/torch-2.11.0.txt

writes the hashes of the versions in that file anew; new lines need a name and a version only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from patchkit.errors import SourceError
from patchkit.source.fetch import described
from patchkit.wheel.vllm.requirements import Pinned, read_requirements

_PYTHONS = tuple(f"cp3{minor}" for minor in range(10, 15))
_MACHINES = ("aarch64", "x86_64")


def relock(path: Path) -> str:
    """The text of a file with the hashes that the index tells; comments at its top are kept."""
    lines = path.read_text(encoding="utf-8").splitlines()
    top = [line for line in lines if line.startswith("#")]
    return "\n".join([*top, "", *map(_rendered, read_requirements(path)), ""])


def _rendered(requirement: Pinned) -> str:
    files = sorted(_hashes(requirement.name, requirement.version))
    if not files:
        raise SourceError(f"the index has no wheel of {requirement.name} {requirement.version}")
    marker = f" ; {requirement.marker}" if requirement.marker else ""
    head = f"{requirement.name}=={requirement.version}{marker}"
    return " \\\n".join([head, *(f"    --hash=sha256:{digest}" for digest in files)])


def _hashes(project: str, version: str) -> Iterator[str]:
    for filename, digest in described(project):
        try:
            _, found, _, tags = parse_wheel_filename(filename)
        except InvalidWheelFilename:
            continue
        if str(found) == version and any(map(_fits, tags)):
            yield digest


def _fits(tag: Tag) -> bool:
    python = tag.interpreter.startswith("py") and tag.abi == "none"
    python = python or (tag.interpreter in _PYTHONS and tag.abi in ("none", tag.interpreter))
    python = python or (tag.abi == "abi3" and tag.interpreter.startswith("cp3"))
    machine = tag.platform.endswith(_MACHINES) and "linux" in tag.platform
    return python and "musl" not in tag.platform and (machine or tag.platform == "any")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(relock(Path(name)), encoding="utf-8")
