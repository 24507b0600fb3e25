"""Turn the patches that a user names into fixes. Their lines must fit the code exactly."""

from __future__ import annotations

import email.parser
import email.policy
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from os.path import commonprefix
from pathlib import Path

from patchkit.digests import digest
from patchkit.durable.paths import place_of
from patchkit.edit.splice import Edit, line_of
from patchkit.edit.text import new_file
from patchkit.errors import DriftError
from patchkit.patching.fix import Fix, Observation, Patch, Request, found, places
from patchkit.patching.user_diff import FileDiff, parse_diff, try_diff
from patchkit.reading import read_text
from patchkit.source.project import example, projects
from patchkit.source.tree import SourceTree

_LONGEST_HEAD = 4000  # characters; decoding some megabytes takes all memory
_HINT = (
    "take the patch's version for this release, or leave it out; leave a fix of the same lines "
    "out with --without"
)


def read_patches(paths: Sequence[Path]) -> tuple[Patch, ...]:
    """Read the user's patches in order.

    Raises UsageError or SourceError if a file cannot be read or is no sound diff of git.
    """
    patches: dict[str, Patch] = {}
    for path in paths:
        text = read_text(path, hint="name a file with a diff of git")
        parse_diff(text, path.name)

        subject = re.sub(r"^\[[^]]*PATCH[^]]*\] *", "", _subject_of(text))
        title = subject[:200] or path.stem
        sha256 = digest(text)
        words = re.sub("[^a-z0-9]+", " ", title.lower())
        slug = textwrap.shorten(words, 50, placeholder="") or sha256[:8]
        patch_id = f"patch {slug}".replace(" ", "-")
        if patch_id in patches:
            patch_id += f"-{sha256[:8]}"

        patches[patch_id] = Patch(
            id=patch_id,
            title=title,
            sha256=sha256,
            text=text,
        )
    return tuple(patches.values())


def _subject_of(text: str) -> str:
    """Return the subject of a mail in one line, "" if the text is no mail.

    Only the headers are parsed: the parts of a mail may be nested too deeply.
    """
    parser = email.parser.HeaderParser(policy=email.policy.default)
    headers = parser.parsestr(text[:_LONGEST_HEAD])
    return " ".join(str(headers["Subject"] or "").split())


def fixes_for(fixes: Sequence[Fix], request: Request) -> list[Fix]:
    """Return the fixes and the user's patches (as fixes) in the order of application."""
    patches = map(_patch_fix, request.patches)
    return sorted([*fixes, *patches], key=lambda fix: fix.last)


def _patch_fix(patch: Patch) -> Fix:
    """Return a patch as a fix. Its ``needs`` are empty: no version table knows it."""

    def look(tree: SourceTree, _request: Request) -> Observation:
        return _look_at(patch, tree)

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


def _look_at(patch: Patch, tree: SourceTree) -> Observation:
    """Return the edits that a patch makes in a tree, or that they are made already.

    Files that are neither built nor installed are left out, with a note. Raises DriftError if the
    patch does not fit.
    """
    files = parse_diff(patch.text, patch.id)
    parts = projects()[tree.project].parts or ("",)
    used = [file for file in files if file.path.startswith(parts)]
    left_out = ", ".join(file.path for file in files if file not in used)
    if not used:
        raise DriftError(
            f"it changes only what is neither built nor installed: {left_out}",
            why="nothing of what is built would change",
            hint="leave it out",
        )
    if tree.kind == "installed":
        _require_installed(used, tree.project)

    edits: list[Edit] = []
    done: list[str] = []
    for file in used:
        file_edits = _edits_of(file, tree)
        edits += file_edits
        if not file_edits:
            done.append(file.path)
    if edits and done:
        raise _drift(
            f"{edits[0].path}: lacks what {done[0]} has already",
            "half of the patch is in the code",
        )

    paths = places([file.path for file in used])
    observation = found(
        edits,
        now=f"{places(_spots_of(edits, tree))}: the patch fits",
        done=f"{paths}: as the patch leaves it",
    )
    if not left_out:
        return observation

    return replace(
        observation,
        note=f"{patch.id}: not built or installed, so left out: {left_out}",
    )


def _spots_of(edits: Sequence[Edit], tree: SourceTree) -> list[str]:
    """Return ``FILE:LINE`` for each edit."""
    spots = []
    for edit in edits:
        line = line_of(tree.find(edit.path) or "", edit.start)
        spots.append(f"{edit.path}:{line}")
    return spots


def _require_installed(files: Sequence[FileDiff], project: str) -> None:
    """Raise DriftError for a file outside the package's folder: no wheel contains it."""
    for file in files:
        if not file.path.startswith(f"{projects()[project].package}/"):
            raise DriftError(
                f"{file.path}: is in no wheel",
                why="it decides what is compiled, packed or required",
                hint=f"patchkit apply {example(project)} --patch FILE",
            )


def _drift(what: str, why: str) -> DriftError:
    return DriftError(what, why=why, hint=_HINT)


def _edits_of(file: FileDiff, tree: SourceTree) -> list[Edit]:
    """Return the edits that a patch makes in a file, [] if the file has them already.

    Raises DriftError if the patch does not fit, or changes more than a text.
    """
    path = file.path
    if file.beyond:
        raise DriftError(
            f"{path}: the patch says `{file.beyond}`",
            why="a patch may change and create texts; it may not move, delete or link files",
            hint="take that part out of the patch",
        )
    if file.creates:
        place_of(tree.root, path)
        trial = try_diff(file, None)
        if trial.after is None:
            raise _drift(trial.problem, "git cannot create it")
        return new_file(path, tree.find(path), trial.after, note="by a patch")

    text = tree.read(path)
    forward = try_diff(file, text)
    reverse = try_diff(file, text, "--reverse")
    fits = forward.after is not None
    is_done = reverse.after is not None
    if fits and is_done:
        # The lines occur more than once: only a fit at the lines that the diff names counts.
        fits = not forward.moved
        is_done = not reverse.moved
    if fits == is_done:
        problem = forward.problem or f"{path}: fits, and is in already"
        raise _drift(problem, "the code has other lines there, or half of the patch")
    if is_done or forward.after in (None, text):
        return []
    return [_edit_between(path, text, forward.after)]


def _edit_between(path: str, text: str, after: str) -> Edit:
    """Return the smallest single edit that turns ``text`` into ``after``."""
    start = len(commonprefix([text, after]))  # noqa: RUF071
    ends = [text[start:][::-1], after[start:][::-1]]
    tail = len(commonprefix(ends))  # noqa: RUF071
    replacement = after[start : len(after) - tail]
    return Edit(path, start, len(text) - tail, replacement, "by a patch")
