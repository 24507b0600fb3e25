"""Take the newest releases out of every table, add them again, and compare with what is committed.

    nox -s add-release-proof

The copy of a checkout that has never heard of the newest vLLM, and of the newest NCCL, is given to
`add-release`. Nothing may differ afterwards: what a person knows about NCCL, the commit and who
vouches for it, is given again. Needs the package index.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from patchkit.patching.recipe import load_recipe
from patchkit.recipes.vllm.build import recorded_needs
from patchkit.source.releases import load_facts, read_lock, read_wheel_lock
from patchkit.wheel.build.requirements import read_requirements
from tools.entries import with_releases, with_span, without
from tools.index_entries import render_lock
from tools.stage import ROOT, differences, run_in, staged


def main() -> int:
    """Prove both projects; return 1 if one comes back otherwise."""
    newest, release = load_recipe("vllm").newest, load_facts("nccl").releases[-1]
    with staged() as stage:
        torch = _forget_vllm(stage, str(newest))
        wrong = _differs(stage, [str(newest)], f"vllm {newest}, torch {torch}")
    # Its figures are a person's, and given.
    figures = {
        "commit": release.commit,
        "sha256": release.sha256,
        "figures": release.figures,
    }
    given = [f"--{name}={value}" for name, value in figures.items() if value]
    version = str(release.version)
    with staged() as stage:
        _edit(
            stage / "recipes" / "nccl" / "recipe.toml",
            lambda text: without(text, version),
        )
        run_in(stage, "tools.regenerate", "--pages")
        return int(
            wrong | _differs(stage, ["nccl", version, *given], f"nccl {version}")
        )


def _forget_vllm(stage: Path, version: str) -> str:
    """Take a release out of a copy, and its torch if no earlier one takes it; return that."""
    home = stage / "recipes" / "vllm"
    releases = [
        str(each) for each in load_recipe("vllm").releases if str(each) != version
    ]
    _edit(home / "recipe.toml", lambda text: with_releases(text, releases))
    supported = [str(each) for each in load_recipe("vllm").supported[:-1]]
    _edit(stage / "README.md", lambda text: with_span(text, supported))
    sdists = read_lock(home / "lock.toml")
    _edit(
        home / "lock.toml",
        lambda _: render_lock(e for v, e in sdists.items() if v != version),
    )
    wheels = read_wheel_lock(home / "wheels.toml").values()
    kept = {e.filename: e for lock in wheels for v, e in lock.items() if v != version}
    _edit(home / "wheels.toml", lambda _: render_lock(kept.values(), "wheel"))
    _edit(home / "build.toml", lambda text: without(text, version))
    torch = recorded_needs(load_recipe("vllm").newest).torch
    if torch != recorded_needs(load_recipe("vllm").supported[-2]).torch:
        _edit(home / "build.toml", lambda text: without(text, torch))
        (home / "requirements" / f"torch-{torch}.txt").unlink()
    # No source is read: the tables are written for the releases that are left.
    if run_in(stage, "tools.regenerate", "--none"):
        raise SystemExit("the tables without the release cannot be written")
    assert not any(
        version in line for line in (home / "support.json").read_text().splitlines()
    )
    return torch


def _differs(stage: Path, arguments: Sequence[str], title: str) -> bool:
    """Add a release again; return whether it comes back otherwise than it was."""
    gone = [each.path for each in differences(ROOT, stage)]
    print(f"{title}: taken out of {len(gone)} files: {', '.join(gone)}")
    if code := run_in(stage, "tools.add_release", *arguments):
        print(f"{title}: add-release ended with {code}")
        return True
    wrong = [
        each.path
        for each in differences(ROOT, stage)
        if not _of_the_day(stage, each.path)
    ]
    for path in wrong:
        before, after = (
            place.read_text().splitlines(keepends=True) if place.exists() else []
            for place in (ROOT / path, stage / path)
        )
        unlike = difflib.unified_diff(
            before, after, path, "with the release added again"
        )
        print("".join([*unlike][:60]))
    print(
        f"{title}: {f'comes back otherwise in {wrong}' if wrong else 'comes back as it was'}"
    )
    return bool(wrong)


def _of_the_day(stage: Path, path: str) -> bool:
    """Whether a file is a lock: what torch leaves open has the versions of the day it was made."""
    if not path.startswith("recipes/vllm/requirements/"):
        return False
    before, after = (
        {(each.name, each.version) for each in read_requirements(root / path)}
        for root in (ROOT, stage)
    )
    print(
        f"{path}: of this day {sorted(after - before)}, of that {sorted(before - after)}"
    )
    return True


def _edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
