"""The jobs of .github/workflows/wheels.yml: a wheelhouse for each release that was asked for.

    nox -s wheel-jobs -- [--vllm="X.Y.Z …"] [--nccl="X.Y.Z …"]

A vLLM release comes with the NCCL that its torch pins; an NCCL release is a wheel by itself. With
neither, it is the newest vLLM that is known. What cannot be built is refused here, before the first
machine starts. The answer goes to standard output and, on a runner, into $GITHUB_OUTPUT.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

from packaging.version import InvalidVersion, Version

from patchkit.errors import UsageError
from patchkit.patching.recipe import load_recipe
from patchkit.recipes.vllm.build import locked_requirements, recorded_needs
from patchkit.source.releases import load_facts
from tools import run_program


def jobs(vllm: str, nccl: str) -> list[dict[str, str]]:
    """Return the matrix: what each wheelhouse is called, and the releases that go into it.

    ``vllm`` and ``nccl`` are versions with blanks or commas between them, as somebody typed them.
    Raises UsageError for what is no version, SourceError for a release that cannot be built.
    """
    releases, libraries = map(_versions, (vllm, nccl))
    if not releases and not libraries:
        releases = [load_recipe("vllm").newest]
    for each in releases:
        _require_known("vllm", each)
        locked_requirements(recorded_needs(each).torch)
    for each in libraries:
        _require_known("nccl", each)
        load_facts("nccl").known(each)
    return [
        *({"name": f"vllm-{each}", "vllm": str(each), "nccl": ""} for each in releases),
        *(
            {"name": f"nccl-{each}", "vllm": "", "nccl": str(each)}
            for each in libraries
        ),
    ]


def _versions(text: str) -> list[Version]:
    found = []
    for word in re.split(r"[\s,]+", text):
        try:
            found += [Version(word)] if word else []
        except InvalidVersion:
            raise UsageError(
                f"{word!r} is not a version", hint="for example 0.25.1"
            ) from None
    return [*dict.fromkeys(found)]


def _require_known(project: str, version: Version) -> None:
    recipe = load_recipe(project)
    recipe.check(version)
    if version not in recipe.releases:
        raise UsageError(
            f"{project} {version} is not a release that this patchkit knows",
            hint=f"its newest is {recipe.newest}",
        )


def main() -> int:
    """Print the matrix and hand it to the runner."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", default="", metavar="X.Y.Z …")
    parser.add_argument("--nccl", default="", metavar="X.Y.Z …")
    args = parser.parse_args()
    return hand_over("wheelhouses", jobs(args.vllm, args.nccl))


def hand_over(name: str, matrix: list[dict[str, str]]) -> int:
    """Print a matrix, and give it to a runner as an output of its step."""
    line = f"{name}={json.dumps(matrix)}"
    print(line)
    if output := os.environ.get("GITHUB_OUTPUT"):
        with Path(output).open("a", encoding="utf-8") as runner:
            runner.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    run_program(main)
