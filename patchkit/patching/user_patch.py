"""Make fixes of patches that a user names: exact lines decide, or a merge by git where it can."""

from __future__ import annotations

import email
import email.policy
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from operator import eq
from pathlib import Path

from patchkit.digests import digest
from patchkit.durable.staging import ScratchFolder
from patchkit.edit.splice import Edit, line_of, splice
from patchkit.edit.text import new_file
from patchkit.edit.unified_diff import FileDiff, Hunk, parse_diff, refused
from patchkit.errors import DriftError
from patchkit.patching.fix import Fix, Observation, Patch, Request, found, places
from patchkit.process import attempt
from patchkit.reading import read_text
from patchkit.source.detect import NO_FETCH, projects
from patchkit.source.tree import SourceTree

_NOWHERE, _UNCLEAR = -1, -2  # instead of an offset
_WIDEST = 80  # characters of a line that is shown
_HINT = "take the patch's version for this release, or leave it out"


def read_patches(paths: Sequence[Path]) -> tuple[Patch, ...]:
    """Read patches in order. Raises UsageError, SourceError for what is no unified diff."""
    patches: dict[str, Patch] = {}
    for path in paths:
        text = read_text(path, hint="name a file with a unified diff")
        parse_diff(text, path.name)
        subject = email.message_from_string(text, policy=email.policy.default)["Subject"]
        title = re.sub(r"^\[[^]]*PATCH[^]]*\] *", "", " ".join(str(subject or "").split()))
        title, sha256 = title[:200] or path.stem, digest(text)
        slug = re.sub("[^a-z0-9]+", "-", title.lower()).strip("-")[:50].strip("-")
        name = f"patch-{slug or sha256[:8]}"
        if any(known.sha256 == sha256 for known in patches.values()):
            raise refused(str(path), "is named twice", "name each patch once")
        name = f"{name}-{sha256[:8]}" if name in patches else name
        patches[name] = Patch(id=name, title=title, sha256=sha256, text=text)
    return tuple(patches.values())


def fixes_for(fixes: Sequence[Fix], request: Request) -> list[Fix]:
    """Return fixes, and the user's patches as such, in the order in which they are applied."""
    return sorted([*fixes, *map(_patch_fix, request.patches)], key=lambda fix: fix.last)


def _patch_fix(patch: Patch) -> Fix:
    """Return the fix that a patch is: no table knows releases that need it."""
    files = parse_diff(patch.text, patch.id)

    def look(tree: SourceTree, _request: Request) -> Observation:
        try:
            return _look_at(patch, files, tree)
        except DriftError as error:
            try:
                _look_at(patch, files, replace(tree, overlay={}))
            except DriftError:
                raise error from None
            why = "it fits the release, but a fix or a patch before it changes these lines"
            raise DriftError(error.what, why=why, hint="leave that one out") from None

    return Fix(
        id=patch.id,
        title=patch.title,
        symptom=f"asked for with --patch: sha256:{patch.sha256}",
        why="The user named it.",
        needs=(),
        upstream="not known",
        evidence=(),
        look=look,
    )


def _look_at(patch: Patch, files: Sequence[FileDiff], tree: SourceTree) -> Observation:
    project, installed = projects()[tree.project], tree.kind == "installed"
    of_project = [file for file in files if file.path.startswith(project.parts)]
    aside = [file.path for file in files if file not in of_project]
    if not of_project:
        what = (
            f"{places(aside)}: no part of what is built or installed, and nothing else is changed"
        )
        raise DriftError(what, why=f"it is no patch of {project.title}", hint=_HINT)
    for file in of_project:
        if installed and not file.path.startswith(f"{tree.project}/"):
            raise DriftError(
                f"{file.path}: is no part of an installed package, nor of a wheel",
                why="it decides what is compiled, or required",
                hint=f"patch the sources: patchkit build {tree.project} --patch",
            )
    pairs = [(file, _edits_of(file, tree)) for file in of_project]
    edits = [edit for _file, made in pairs for edit in made]
    there = [file.path for file, made in pairs if not made]
    if edits and there:
        what = f"{edits[0].path}: lacks what {there[0]} has already"
        raise DriftError(what, why="half of the patch is in the code", hint=_HINT)
    spots = [f"{it.path}:{line_of(tree.find(it.path) or '', it.start)}" for it in edits]
    done = f"{places([file.path for file in of_project])}: as the patch leaves it"
    note = f"{patch.id}: not built or installed, so left out: {', '.join(aside)}" if aside else ""
    return replace(found(edits, now=f"{places(spots)}: the patch fits", done=done), note=note)


def _edits_of(file: FileDiff, tree: SourceTree) -> list[Edit]:
    """Return the edits of a file, none if it is as the patch leaves it. Raises DriftError."""
    path, hunks, note = file.path, file.hunks, f"by {file.where}"
    if file.beyond:
        why = "patchkit changes and creates texts, which it can take back"
        raise DriftError(f"{path}: the patch {file.beyond} ({file.where})", why=why, hint=_HINT)
    if file.creates:
        text = "".join(hunk.texts[1] for hunk in hunks)
        return new_file(path, tree.find(path), text, note=note)
    text = tree.read(path)
    needed, done = (_find_hunks(text, hunks, side) for side in (0, 1))
    fits, is_done = min(needed) >= 0, min(done) >= 0
    if fits and is_done:  # the same lines stand elsewhere: where the patch says is the one
        lines = [[line_of(text, spot) for spot in spots] for spots in (needed, done)]
        fits, is_done = (lines[side] == [it.starts[side] for it in hunks] for side in (0, 1))
    if fits != is_done:
        return _edits_at(path, needed, hunks, note) if fits else []
    merged, why = _merge_by_git(file, tree, text)
    half = [it for it, *spots in zip(hunks, needed, done, strict=True) if spots[0] < 0 <= spots[1]]
    if merged == text:
        return []
    if merged is not None and not half:
        start = next(at for at, pair in enumerate(zip_longest(text, merged)) if pair[0] != pair[1])
        return [Edit(path, start, len(text), merged[start:], note)]
    missing = [it for it, spot in zip(hunks, done, strict=True) if spot < 0]
    if half and missing:
        what = f"{_difference(path, text, missing[0], 1)}; {half[0].where} is in already"
        raise DriftError(what, why="half of the patch is in the code", hint=_HINT)
    lost = [it for it, spot in zip(hunks, needed, strict=True) if spot < 0] or hunks
    raise DriftError(_difference(path, text, lost[0], 0), why=why, hint=_HINT)


def _find_hunks(text: str, hunks: Sequence[Hunk], side: int) -> list[int]:
    """Return where each hunk is. One that is there several times is where its head says, if the
    others are: moved, it could be any of them.
    """
    found_at = [[(it, line_of(text, it)) for it in hunk.find_spots(text, side)] for hunk in hunks]
    pairs = list(zip(hunks, found_at, strict=True))
    still = all(spots[0][1] == it.starts[side] for it, spots in pairs if len(spots) == 1)
    chosen, end = [], 0
    for hunk, spots in pairs:
        at_head = [
            it for it, line in spots if len(spots) == 1 or (still and line == hunk.starts[side])
        ]
        spot = at_head[0] if at_head else _UNCLEAR if spots else _NOWHERE
        chosen.append(spot if spot < 0 or spot >= end else _UNCLEAR)
        end = max(end, spot + len(hunk.texts[side]))
    return chosen


def _edits_at(path: str, spots: Sequence[int], hunks: Sequence[Hunk], note: str) -> list[Edit]:
    placed = zip(spots, hunks, strict=True)
    return [Edit(path, at, at + len(it.texts[0]), it.texts[1], note) for at, it in placed]


def _difference(path: str, text: str, hunk: Hunk, side: int) -> str:
    """Say where a hunk is not in a text, by the place that is most like it."""
    if spots := hunk.find_spots(text, side):
        lines = ",".join(str(line_of(text, spot)) for spot in spots)
        return (
            f"{path}:{lines}: the lines of {hunk.where} are there, but which are meant is unclear"
        )
    rows, wanted = text.split("\n"), hunk.texts[side].removesuffix("\n").split("\n")
    size, start = len(wanted), hunk.starts[side] - 1

    def likeness(at: int) -> tuple[int, int]:
        return sum(map(eq, wanted, rows[at : at + size])), -abs(at - start)

    at = max(range(len(rows)), key=likeness)
    pairs = enumerate(zip_longest(wanted, rows[at : at + size], fillvalue=""))
    number, (want, have) = next((it for it in pairs if it[1][0] != it[1][1]), (0, ("", "")))
    said = f"has {have[:_WIDEST]!r}, where {hunk.where} expects {want[:_WIDEST]!r}"
    if want == have:
        said = f"{hunk.where} expects the file to begin or to end here"
    return f"{path}:{at + number + 1}: {said}"


def _merge_by_git(file: FileDiff, tree: SourceTree, text: str) -> tuple[str | None, str]:
    """Return a text with the changes since the patch and the patch's own; else None, and why.

    Raises DriftError where they conflict.
    """
    if tree.kind != "git":
        return None, "only a git checkout has the text to merge with; here exact lines decide"
    variables = os.environ | NO_FETCH
    base = attempt("git", "-C", tree.root, "cat-file", "blob", file.blob, env=variables)
    spots = [_NOWHERE] if base.trouble else _find_hunks(base.output, file.hunks, 0)
    if not file.blob or min(spots) < 0:
        return None, f"the checkout lacks the text that it was made against: {file.blob or 'no id'}"
    theirs = splice(base.output, _edits_at(file.path, spots, file.hunks, ""))
    with ScratchFolder() as folder:
        for name, content in (("ours", text), ("base", base.output), ("theirs", theirs)):
            (Path(folder) / name).write_text(content, encoding="utf-8")
        words = ("git", "merge-file", "-p", "ours", "base", "theirs")
        done = attempt(*words, cwd=Path(folder), env=variables)
    if done.status == 0:
        return done.output, ""
    ours = done.output.partition("<<<<<<< ours\n")[2].partition("=======\n")[0]
    line = line_of(text, max(text.find(ours), 0))
    why = f"both the code since {file.blob} and the patch change these lines"
    raise DriftError(f"{file.path}:{line}: git cannot merge it", why=why, hint=_HINT)
