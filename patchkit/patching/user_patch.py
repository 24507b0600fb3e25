"""Turn the patches that a user names into fixes. Their lines must fit the code exactly."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from patchkit.digests import digest
from patchkit.durable.paths import is_file, is_plain, place_of
from patchkit.durable.staging import ScratchFolder
from patchkit.edit.splice import Edit, Edits
from patchkit.edit.text import new_file
from patchkit.errors import DriftError, UsageError
from patchkit.follow import Completed
from patchkit.frozen import frozen, positional
from patchkit.patching.fix import Fix, Observation, Patch, Request, found, places
from patchkit.quoting import visible
from patchkit.reading import read_text
from patchkit.source.git import call_git_alone
from patchkit.source.project import example, projects
from patchkit.source.tree import SourceTree

_HINT = (
    "take the patch's version for this release, or leave it out; leave a fix of the same lines "
    "out with --without"
)


# Refused: NUL, CR line endings (every release has LF), diffs of merges.
_UNREADABLE = re.compile("\0|\r|^@@@|^diff --c", re.MULTILINE)
_HUNK = re.compile(
    r"^@@ -(\d{1,9})(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@.*\n", re.MULTILINE
)
_NAMES = re.compile(r'^(?:---|\+\+\+) (?:"?[a-z]/)?(.*?)["\t]*$', re.MULTILINE)
_MOVED = re.compile(r"^(?:rename|copy) from (.*)", re.MULTILINE)
# Header lines that change more than the text of a file.
_BEYOND = re.compile(
    r"^(?:deleted |rename |copy |old mode |new file mode (?!100644)|Binary |GIT binary ).*",
    re.MULTILINE,
)
# Text after the diff: the signature of a mail, or the next mail of a series.
_BEHIND = re.compile(r"^(?:-- \n\d|\n?From [0-9a-f]{40} ).*", re.MULTILINE | re.DOTALL)
# Messages of git apply about hunks.
_FAILED_SPOT = re.compile(r"^error: patch failed: (.*:\d+)$", re.MULTILINE)
_MOVED_HUNK = re.compile(r"^Hunk #\d+ succeeded at ", re.MULTILINE)
_MOST_FILES = 1000  # the largest pull requests of vLLM have some hundreds
_MOST_HUNKS = 5000
_SHOWN = 200  # characters of a name
# Folders with settings that git and patchkit obey.
_OBEYED = frozenset({".git", ".patchkit"})
_FAR = "999999999"  # a line after the end of every file
# Heads of hunks, except those at line 1: git applies these only at the begin of the file.
_LINE_NUMBERS = re.compile(r"^@@ -(?:[2-9]|\d\d+)(,\d+)? \+\d+(,\d+)? @@", re.MULTILINE)


@frozen
class FileDiff:
    """The part of a diff that is about one file.

    ``beyond`` is the header line that changes more than the text (mode, name …), "" if none.
    """

    path: str
    part: str
    creates: bool
    beyond: str


@positional
class Trial:
    """Result of applying the diff of one file to a text.

    ``after`` is the new text if every hunk fits in exactly one place; else it is None, and
    ``problem`` says why. ``moved``: a hunk fits at another line than the diff names.
    """

    after: str | None
    problem: str
    moved: bool = False


def parse_diff(text: str, name: str) -> list[FileDiff]:
    """Return the part of a diff for each file; ``name`` names the diff in errors.

    Raises UsageError for an unsound diff, HostError if git is not installed.
    """
    if _UNREADABLE.search(text):
        raise _refused(f"{name} has NULs or CR line endings, or is the diff of a merge")

    preamble, *parts = re.split("^(?=diff --git )", text, flags=re.MULTILINE)
    if not parts:
        raise _refused(f"{name} has no line `diff --git a/FILE b/FILE`")
    if len(parts) > _MOST_FILES or len(_HUNK.findall(text)) > _MOST_HUNKS:
        raise _refused(f"{name} has over {_MOST_FILES} files or {_MOST_HUNKS} hunks")

    paths = _read_paths(text, name)
    if len(paths) != len(parts) or _HUNK.search(preamble):
        raise _refused(f"{name} has a part without a name, or without a change")

    files = []
    for path, part in zip(paths, parts, strict=True):
        files += _read_part(path, part, name)
    _check_paths([file.path for file in files], name)
    return files


def try_diff(file: FileDiff, text: str | None, *options: str) -> Trial:
    """Try to apply the diff of one file to its text, None if there is no file.

    A diff that does not fit is reported in the result. Raises HostError if git is not installed.
    git applies a hunk at the fitting place nearest to the line it names. If a hunk is not at its
    line, applying from the begin and from the end of the file must give the same text.
    """
    after, done = _apply(file.path, file.part, text, *options)
    if after is None:
        spot = _FAILED_SPOT.search(done.errors)
        problem = f"{spot[1]}: does not fit" if spot else f"{file.path}: {done.trouble}"
        return Trial(None, problem)
    if not _MOVED_HUNK.search(done.errors):
        return Trial(after, "")

    for number in ("2", _FAR):
        part = _LINE_NUMBERS.sub(rf"@@ -{number}\1 +{number}\2 @@", file.part)
        if _apply(file.path, part, text, *options)[0] != after:
            problem = "fits in several places, and not at the line that it names"
            return Trial(None, f"{file.path}: {problem}")
    return Trial(after, "", moved=True)


def _apply(
    path: str, diff: str, text: str | None, *options: str
) -> tuple[str | None, Completed]:
    """Return the text after ``git apply``, None if git refuses, and the finished git process."""
    with ScratchFolder() as folder:
        place = Path(folder) / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            place.write_bytes(text.encode())

        # --verbose reports hunks that fit at another line.
        done = call_git_alone(
            Path(folder),
            "apply",
            "--verbose",
            "--whitespace=nowarn",
            *options,
            input=diff.encode(),
        )
        fits = done.status == 0 and is_file(place)
        return read_text(place) if fits else None, done


def _refused(what: str) -> UsageError:
    return UsageError(
        what,
        why="it is not a patch of plain texts, as git writes it",
        hint="make it with git diff; name each patch of a series by itself",
    )


def _read_paths(text: str, name: str) -> list[str]:
    """Return the path of each part of a diff, as git reads it. Raises UsageError if git refuses."""
    with ScratchFolder() as folder:
        done = call_git_alone(
            Path(folder), "apply", "--numstat", "-z", input=text.encode()
        )
    if done.trouble:
        raise _refused(f"{name}: git apply: {done.trouble}")

    rows = done.output.removesuffix("\0").split("\0")
    return [row.split("\t", 2)[2] for row in rows]


def _read_part(path: str, part: str, name: str) -> list[FileDiff]:
    """Return the diff of a file, and one more for the file that it moves or copies.

    Raises UsageError for an unsound hunk or header.
    """
    head, *fields = _HUNK.split(_BEHIND.sub("", part))
    for index in range(0, len(fields), 4):
        _check_hunk(f"{name}, {path[:_SHOWN]}", *fields[index : index + 4])

    change = _BEYOND.search(head)
    file = FileDiff(
        path=path,
        part=part,
        creates="\nnew file mode " in head,
        beyond=change[0] if change else "",
    )
    if moved := _MOVED.search(head):
        return [file, replace(file, path=moved[1].strip('"'))]

    names = {*_NAMES.findall(head)} - {"/dev/null"}
    if len(names) > 1 or bool(names) != bool(fields):
        raise _refused(f"{name}, {path[:_SHOWN]}: has two names, or no hunks")
    return [file]


def _check_hunk(where: str, start: str, old: str, new: str, body: str) -> None:
    """Raise UsageError for an unsound hunk that git would accept.

    ``start``, ``old`` and ``new`` are the first line and the line counts in its head.
    """
    rows = body.removesuffix("\n").split("\n")
    signs = {row[:1] for row in rows}
    # "" is an empty context line whose leading space a mailer has removed.
    before = [row[1:] for row in rows if row[:1] in ("", " ", "-")]
    after = [row[1:] for row in rows if row[:1] in ("", " ", "+")]

    is_counted = len(before) == int(old or 1) and len(after) == int(new or 1)
    is_whole = is_counted and signs <= {"", " ", "+", "-", "\\"}
    has_change = before != after or "\\" in signs
    has_lines_around = int(start) <= 1 or not signs.isdisjoint(("", " "))
    if not (is_whole and has_change and has_lines_around):
        what = "other lines than its head says, no change, or no lines around it (-U0)"
        raise _refused(f"{where}: the hunk of line {start} has {what}")


def _check_paths(paths: Sequence[str], name: str) -> None:
    """Raise UsageError for a path that is no source, appears twice, or is below another path."""
    files = set(paths)
    for path in paths:
        is_obeyed = not _OBEYED.isdisjoint(path.casefold().split("/"))
        # U+FFFD stands for bytes that are no UTF-8.
        is_sound = is_plain(path) and path.isprintable() and "\ufffd" not in path
        is_folder = not files.isdisjoint(map(str, PurePosixPath(path).parents))
        if is_obeyed or is_folder or not is_sound:
            raise _refused(f"{name} names {path[:_SHOWN]!r}: no source in a tree")

    if len(files) < len(paths):
        raise _refused(f"{name} changes a file twice")


def read_patches(paths: Sequence[Path]) -> tuple[Patch, ...]:
    """Read the user's patches in order.

    Raises UsageError or SourceError if a file cannot be read or is no sound diff of git.
    """
    patches: dict[str, Patch] = {}
    for path in paths:
        text = read_text(path, hint="name a file with a diff of git")
        parse_diff(text, path.name)

        sha256 = digest(text)
        words = re.sub("[^a-z0-9]+", " ", path.stem.lower())
        slug = textwrap.shorten(words, 50, placeholder="") or sha256[:8]
        patch_id = f"patch {slug}".replace(" ", "-")
        if patch_id in patches:
            patch_id += f"-{sha256[:8]}"

        patches[patch_id] = Patch(
            id=patch_id,
            title=visible(path.stem),
            sha256=sha256,
            text=text,
        )
    return tuple(patches.values())


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

    edits: Edits = []
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
        now=f"{paths}: the patch fits",
        done=f"{paths}: as the patch leaves it",
    )
    if not left_out:
        return observation

    return replace(
        observation,
        note=f"{patch.id}: not built or installed, so left out: {left_out}",
    )


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


def _edits_of(file: FileDiff, tree: SourceTree) -> Edits:
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
    return [Edit(path, 0, len(text), forward.after, "by a patch")]
