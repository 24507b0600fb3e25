"""Add a release to everything that patchkit knows, whole or not at all.

    nox -s add-release -- X.Y.Z             a release of vLLM
    nox -s add-release -- nccl X.Y.Z [...]  a release of NCCL; tools/nccl_release.py has the options

It works on a copy of the checkout, from the package index and the release's own sources, and puts
what has changed in place in one step. What a person has to decide is printed, each with the file to
edit: then run it again. Downloads are kept, and a release that is there already only changes where
something else has.
"""

from __future__ import annotations

import sys

from tools import run_program
from tools.stage import bring_back, recover, run_in, staged


def main(arguments: list[str]) -> int:
    """Run the steps on a copy, and bring it back if all of them went well."""
    project, *rest = (
        arguments if arguments[:1] in (["vllm"], ["nccl"]) else ["vllm", *arguments]
    )
    if not rest or rest[0].startswith("-"):
        print(__doc__)
        return 2
    module, version = f"tools.{project}_release", rest[0]
    tables = ["--release", version] if project == "vllm" else ["--pages"]
    steps = [
        [module, "enter", *rest],
        ["tools.regenerate", *tables],
        [module, "review", version],
    ]
    recover()
    with staged() as stage:
        codes = []
        for step in steps:
            codes.append(run_in(stage, *step))
            if codes[-1] > 1:  # an error; 1 is for what a person has to decide first
                break
        if any(codes):
            print(f"{project} {version} is not entered, and no file was changed")
            return max(codes)
        changed = bring_back(stage)
    for path in changed:
        print(f"written: {path}")
    print(
        f"{project} {version} is in the tables: read the difference, then `nox -s tests matrix`"
    )
    return 0


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
