"""Make fixes of patches that a user names: exact lines decide, or a merge by git where it can."""

from __future__ import annotations

import contextlib
import email.parser
import email.policy
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from operator import eq
from pathlib import Path

from patchkit.digests import digest
from patchkit.durable.paths import place_of
from patchkit.edit.splice import Edit, line_of, splice
from patchkit.edit.text import new_file
from patchkit.edit.unified_diff import FileDiff, Hunk, parse_diff
from patchkit.errors import DriftError
from patchkit.patching.fix import Fix, Observation, Patch, Request, found, places
from patchkit.reading import read_text
from patchkit.source.detect import projects
from patchkit.source.git import merge_texts, read_blob
from patchkit.source.tree import SourceTree

_MOST_COMPARED = (
    200  # lines of a hunk, where the place is looked for that is most like it
)
_LONGEST_SUBJECT = 1000  # characters: some megabytes of encoded words take all memory
_HALF = "half of the patch is in the code"
_HINT = "take the patch's version for this release, or leave it out"


def read_patches(paths: Sequence[Path]) -> tuple[Patch, ...]:
    """Read patches in order. Raises UsageError, SourceError for what is no unified diff."""
    patches: dict[str, Patch] = {}
    for path in paths:
        text = read_text(path, hint="name a file with a unified diff")
        parse_diff(text, path.name)
        title = re.sub(r"^\[[^]]*PATCH[^]]*\] *", "", _subject_of(text))
        title, sha256 = title[:200] or path.stem, digest(text)
        words = textwrap.shorten(
            re.sub("[^a-z0-9]+", " ", title.lower()), 50, placeholder=""
        )
        name = f"patch-{words.replace(' ', '-') or sha256[:8]}"
        name = f"{name}-{sha256[:8]}" if name in patches else name
        patches[name] = Patch(id=name, title=title, sha256=sha256, text=text)
    return tuple(patches.values())


def _subject_of(text: str) -> str:
    """Return the subject of a mail in one line, "" for what is none.

    The headers alone are read: parts of a mail may be nested without an end.
    """
    headers = email.parser.HeaderParser().parsestr(text)
    encoded = str(headers["Subject"] or "")[:_LONGEST_SUBJECT]
    subject = email.policy.default.header_fetch_parse("Subject", encoded)
    return " ".join(str(subject).split())


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
            with contextlib.suppress(DriftError):
                _look_at(patch, files, replace(tree, overlay={}))
                error.why = (
                    "it fits the release, but a fix or a patch before it is in its way"
                )
                error.hint = "leave that one out with --without"
            raise

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
    parts = projects()[tree.project].parts
    taken = {file.path: file for file in files if file.path.startswith(parts)}
    aside = ", ".join(file.path for file in files if file.path not in taken)
    if not taken:
        raise _drift(
            f"{aside}: nothing else is changed", "none of it is built or installed"
        )
    for path in taken if tree.kind == "installed" else ():
        if not path.startswith(f"{tree.project}/"):
            what, why = (
                f"{path}: is in no wheel",
                "it decides what is compiled, packed or required",
            )
            raise DriftError(
                what, why=why, hint=f"patchkit build {tree.project} --patch FILE"
            )
    made = {path: _edits_of(file, tree) for path, file in taken.items()}
    edits = [edit for each in made.values() for edit in each]
    there = [path for path, each in made.items() if not each]
    if edits and there:
        raise _drift(f"{edits[0].path}: lacks what {there[0]} has already", _HALF)
    spots = [f"{it.path}:{line_of(tree.find(it.path) or '', it.start)}" for it in edits]
    done = f"{places([*taken])}: as the patch leaves it"
    note = f"{patch.id}: not built or installed, so left out: {aside}" if aside else ""
    return replace(
        found(edits, now=f"{places(spots)}: the patch fits", done=done), note=note
    )


def _drift(what: str, why: str) -> DriftError:
    return DriftError(what, why=why, hint=_HINT)


def _edits_of(file: FileDiff, tree: SourceTree) -> list[Edit]:
    """Return the edits of a file, none if it is as the patch leaves it. Raises DriftError."""
    path, hunks = file.path, file.hunks
    if file.beyond:
        raise _drift(
            f"{path}: {file.beyond}", "patchkit changes and creates plain texts alone"
        )
    if file.creates:
        place_of(tree.root, path)
        text = "".join(hunk.texts[1] for hunk in hunks)
        return new_file(path, tree.find(path), text, note="by a patch")
    text = tree.read(path)
    (needed, fits_head), (done, is_head) = (
        _find_hunks(text, hunks, side) for side in (0, 1)
    )
    fits, is_done = min(needed) >= 0, min(done) >= 0
    if is_done and any(
        hunk.find_spots(text, 0) for hunk in hunks
    ):  # both: the heads decide
        placed = zip(hunks, needed, done, strict=True)
        inside = [0 <= old <= new < old + len(it.texts[0]) for it, old, new in placed]
        fits, is_done = fits and fits_head, is_head and not any(inside)
    if fits != is_done:
        return _edits_at(path, needed, hunks) if fits else []
    merged, why = _merge_by_git(file, tree, text)
    half = [
        it.name
        for it, *at in zip(hunks, needed, done, strict=True)
        if at[0] < 0 <= at[1]
    ]
    if merged is not None and (merged == text or not half):
        pairs = enumerate(zip_longest(text, merged))
        first = next((at for at, (old, new) in pairs if old != new), None)
        return (
            []
            if first is None
            else [Edit(path, first, len(text), merged[first:], "by git")]
        )
    spots = done if half else needed
    lost = [it for it, spot in zip(hunks, spots, strict=True) if spot < 0] or hunks
    what = _difference(path, text, lost[0], 1 if half else 0)
    raise (
        _drift(f"{what}; {half[0]} is in already", _HALF) if half else _drift(what, why)
    )


def _find_hunks(text: str, hunks: Sequence[Hunk], side: int) -> tuple[list[int], bool]:
    """Return where each hunk is, -1 where that is not clear; and whether all are as heads say.

    One that is there several times is where its head says, if nothing is moved.
    """
    heads = _find_heads(text, hunks, side)
    spots_of = [hunk.find_spots(text, side) for hunk in hunks]
    pairs = list(zip(spots_of, heads, strict=True))
    if all(
        len(offsets) != 1 or offsets == [head] for offsets, head in pairs
    ):  # nothing is moved
        placed = zip(hunks, heads, strict=True)
        spots = [head if hunk.is_at(text, head, side) else -1 for hunk, head in placed]
    else:
        spots = [offsets[0] if len(offsets) == 1 else -1 for offsets in spots_of]
    ordered = min(spots) < 0 or spots == sorted(spots)
    return (spots if ordered else [-1] * len(spots)), spots == heads


def _find_heads(text: str, hunks: Sequence[Hunk], side: int) -> list[int]:
    """Return where the line begins that the head of each hunk names."""
    begins = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]
    return [begins[min(hunk.starts[side], len(begins)) - 1] for hunk in hunks]


def _edits_at(path: str, spots: Sequence[int], hunks: Sequence[Hunk]) -> list[Edit]:
    placed = zip(spots, hunks, strict=True)
    return [
        Edit(path, at, at + len(it.texts[0]), it.texts[1], "by a patch")
        for at, it in placed
    ]


def _difference(path: str, text: str, hunk: Hunk, side: int) -> str:
    """Say where a hunk is not in a text, by the place that is most like it."""
    if spots := hunk.find_spots(text, side):
        lines = ",".join(str(line_of(text, spot)) for spot in spots)
        return (
            f"{path}:{lines}: {hunk.name} fits, and which place is meant is not clear"
        )
    rows, wanted = text.split("\n"), hunk.texts[side].removesuffix("\n").split("\n")
    begin = wanted[:_MOST_COMPARED]

    def likeness(at: int) -> tuple[int, int]:
        return sum(map(eq, begin, rows[at : at + len(begin)])), -abs(
            at + 1 - hunk.starts[side]
        )

    at = max(range(len(rows)), key=likeness)
    pairs = enumerate(
        zip_longest(wanted, rows[at : at + len(wanted)], fillvalue=""), at + 1
    )
    unlike = ((line, want, has) for line, (want, has) in pairs if want != has)
    line, want, has = next(unlike, (at + 1, "an end of the file", rows[at]))
    return f"{path}:{line}: has {has[:80]!r}, where {hunk.name} expects {want[:80]!r}"


def _merge_by_git(
    file: FileDiff, tree: SourceTree, text: str
) -> tuple[str | None, str]:
    """Return a text with its own changes and the patch's; None, and why, without what it takes.

    Raises DriftError where they conflict.
    """
    if tree.kind != "git":
        return None, "exact lines decide: only of a git checkout could git merge it"
    base = read_blob(tree.root, file.blob)
    spots, fits = _find_hunks(base, file.hunks, 0)
    if not fits:
        return (
            None,
            f"the checkout lacks the text that it was made against, {file.blob or 'no id'}",
        )
    theirs = splice(base, _edits_at(file.path, spots, file.hunks))
    done = merge_texts(ours=text, base=base, theirs=theirs)
    if done.status == 0:
        return done.output, ""
    ours = done.output.partition("<<<<<<< ours\n")[2].partition("=======\n")[0]
    line = line_of(text, max(text.find(ours), 0))
    raise _drift(
        f"{file.path}:{line}: git cannot merge it", f"both changed it since {file.blob}"
    )
