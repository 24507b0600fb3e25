"""Run the jobs of .github/workflows/releases.yml: what the package index has that the tables lack.

    nox -s new-releases -- [BRANCH ...]

Each is a call of add-release. A series of torch is entered with an NCCL that is there already. What
has a branch `release/NAME` is left alone: somebody is at it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from patchkit.patching.recipe import load_recipe
from patchkit.source.releases import load_facts
from tools import run_program
from tools.index_entries import described
from tools.wheel_jobs import hand_over

_NCCL = "nvidia-nccl-cu13"


def new_releases(
    filenames: Iterable[str], branches: Iterable[str] = ()
) -> list[dict[str, str]]:
    """Return the matrix: names, and what add-release is told; ``filenames`` are the index's."""
    facts = load_facts("nccl")
    newest = {
        "vllm": load_recipe("vllm").newest,
        _NCCL: max(each.version for each in facts.releases),
        "torch": max(map(Version, facts.torch)),
    }
    found: dict[str, str] = {}
    for filename in filenames:
        try:
            project, version, _, _ = parse_wheel_filename(filename)
        except InvalidWheelFilename:
            continue
        if project == "torch":
            version = Version(
                f"{version.major}.{version.minor}{'a0' * version.is_prerelease}"
            )
        if version > newest[project] and not version.is_prerelease:
            name = "nccl" if project == _NCCL else str(project)
            asks = (
                f"nccl {facts.default}" if project == "torch" else f"{name} {version}"
            )
            found[f"{name}-{version}"] = asks
    taken = {each.rpartition("release/")[2] for each in branches}
    return [
        {"name": name, "release": found[name]} for name in sorted(found.keys() - taken)
    ]


def main() -> int:
    """Print the matrix and hand it to the runner."""
    offered = [name for each in ("vllm", _NCCL, "torch") for name, _ in described(each)]
    return hand_over("releases", new_releases(offered, sys.argv[1:]))


if __name__ == "__main__":
    run_program(main)
