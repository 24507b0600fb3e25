"""Give the sessions build-vllm, build-nccl and others, in one call of nox, the words for each.

    nox -s build-vllm build-nccl -- --vllm 0.25.1 --nccl 2.30.7 --jobs 8
    python -m tools.build vllm SESSIONS ... -- WORDS ...      what build-vllm runs

An option goes to every build that takes it. ``--vllm``, ``--nccl`` and ``--flashinfer`` are each
one's release.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import click

from patchkit.cli import main as patchkit
from patchkit.cli.wheel.build import build_command as build
from patchkit.errors import UsageError

RELEASES = {"--vllm": "vllm", "--nccl": "nccl", "--flashinfer": "flashinfer"}
# What both take, and what is never the same for both.
OF_ONE = {
    "--version": "say --vllm X.Y.Z and --nccl X.Y.Z",
    "--src": "run one session at a time",
}


def shared_out(words: Sequence[str], projects: Sequence[str]) -> dict[str, list[str]]:
    """Return the words for each build. Raises UsageError for a word that none takes."""
    given: dict[str, list[str]] = {project: [] for project in projects}
    left = list(words)
    while left:
        name, equals, value = left.pop(0).partition("=")
        takers = [project for project in projects if name in _options(project)]
        if RELEASES.get(name) in projects:
            takers, spelled = [RELEASES[name]], "--version"
        else:
            spelled = name
        if not takers:
            names = [f"`patchkit build {project}`" for project in projects]
            neither = f"neither {' nor '.join(names)} takes it"
            raise UsageError(
                f"{name}: {neither if names[1:] else f'{names[0]} does not take it'}"
            )
        if len(takers) > 1 and name in OF_ONE:
            raise UsageError(f"{name}: both builds take it", hint=OF_ONE[name])
        taken = [spelled + equals + value]
        if not equals and not _options(takers[0])[spelled].is_flag and left:
            taken.append(left.pop(0))
        for project in takers:
            given[project] += taken
    return given


def _options(project: str) -> Mapping[str, click.Option]:
    options = [
        each
        for each in build.commands[project].params
        if isinstance(each, click.Option)
    ]
    known = {name: option for option in options for name in option.opts}
    return {**known, "--help": click.Option(["--help"], is_flag=True)}


def main() -> None:
    """Run one build with its share of the words; all of them are checked first."""
    project, *rest = sys.argv[1:]
    at = rest.index("--")
    try:
        words = shared_out(rest[at + 1 :], rest[:at])[project]
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    sys.argv = ["patchkit", "build", project, *words]
    patchkit()


if __name__ == "__main__":
    main()
