"""Ask questions of upstream's own Python code, which answers in a sandbox.

This is the only way to run a piece of upstream's code. ``ask`` forks a child, which gives up its
rights and only then runs the code. The answer is data (JSON, limited in size), and the caller
judges it outside of the child, so the code cannot change patchkit's memory. Upstream's files can
give false answers to the questions that run them. The questions of each fix have their own child,
so that those files cannot falsify the answers for another fix.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from patchkit import errors
from patchkit.durable.paths import PlainPath
from patchkit.errors import PatchkitError, ProofError
from patchkit.frozen import frozen, positional
from patchkit.proof import upstream_code
from patchkit.proof.child_process import Limits, forked
from patchkit.proof.sandbox import Box, box_for
from patchkit.records import RECIPES, RecordError, Utf8, read_json, record
from patchkit.source.project import user_recipes
from patchkit.source.tree import SourceTree
from patchkit.units import BYTES_PER_MIB

LIMITS = Limits(output=BYTES_PER_MIB)
_HINT = "restore the files from the release, or leave the fix out with --without"
_SHOWN = 2000  # characters kept of an error text of a child
_KINDS: dict[str, type[PatchkitError]] = {
    kind.__name__: kind
    for kind in (
        errors.AbsentError,
        errors.DriftError,
        errors.MissingError,
        errors.ProofError,
        errors.SourceError,
        errors.StorageError,
    )
}

_PATCHKIT = Path(__file__).parents[1]
# Do not allow all of sys.path: its first entry may be the home folder.
_PACKAGES = ("site-packages", "dist-packages")

T = TypeVar("T")
Questions = Sequence[Callable[[], object]]


@positional
class _Raised:
    kind: str
    what: Utf8
    why: Utf8
    hint: Utf8


@frozen
class _ChildAnswer:
    """The whole reply of a child. Do not trust it: upstream's code may have written it.

    ``read`` are the paths of the tree that the questions read.
    """

    answers: list[object] | None
    raised: _Raised | None
    read: list[PlainPath]


def ask(
    tree: SourceTree, questions: Questions, kind: type[T], *, limits: Limits = LIMITS
) -> list[T]:
    """Call the questions in one sandboxed child and return their results, in the same order.

    Results pass through JSON: tuples become lists, keys become strings. ``records`` checks each
    against the type ``kind``; with ``object`` the caller has to check. ``tree`` is the source of
    the code; the files that the questions read are added to its ``seen``. Raises ProofError if
    there is no valid answer, HostError if there is no sandbox, StorageError if no child can be
    started, and the AbsentError, DriftError, ProofError, SourceError or StorageError of a question.
    """
    # The child may still read the libraries of this interpreter, patchkit and the recipes.
    readable = [Path(os.__file__).parent, Path(sys.base_prefix, "lib")]
    readable += [_PATCHKIT, RECIPES, *user_recipes()]
    readable += [path for path in map(Path, sys.path) if path.name in _PACKAGES]
    box = box_for(tree, Box(read=tuple(readable)))

    ended = forked(lambda: _answer(tree, questions), box, limits=limits)
    if ended.trouble:
        raise _silent_error(ended.trouble)
    try:
        reply = read_json(_ChildAnswer, ended.output)
        answers = [record(kind, answer) for answer in reply.answers or ()]
        for path in reply.read:
            # This process computes the digest for `seen` itself: the child could name a wrong one.
            tree.find(path)
        if not reply.raised and len(answers) != len(questions):
            raise RecordError(f"{len(answers)} answers to {len(questions)} questions")
    except (RecordError, OSError) as error:  # OSError: a path that is too long
        problem = str(error)[:_SHOWN]
        raise _silent_error(f"it answered with what does not fit: {problem}") from None

    if reply.raised:
        raise _raised_error(reply.raised)
    return answers


def _raised_error(raised: _Raised) -> PatchkitError:
    kind = _KINDS.get(raised.kind, ProofError)
    return kind(
        raised.what[:_SHOWN], why=raised.why[:_SHOWN], hint=raised.hint[:_SHOWN]
    )


def _silent_error(trouble: str) -> ProofError:
    return ProofError(
        f"upstream's code gave no answer: {trouble}",
        why="it was edited by hand, or does more than decide",
        hint=_HINT,
    )


# The functions below run in the child.


def _answer(tree: SourceTree, questions: Questions) -> None:
    """Call the questions and write a ``_ChildAnswer`` as JSON to descriptor 1."""
    seen_before = set(tree.seen)
    reply: dict[str, object] = {"answers": None, "raised": None}

    try:
        with upstream_code.permitted():
            answers = [question() for question in questions]
            # Convert here, so that a value that JSON cannot hold is reported as an error.
            reply["answers"] = json.loads(json.dumps(answers))
    except BaseException as error:  # noqa: BLE001
        reply["raised"] = asdict(_describe(error))

    reply["read"] = sorted(set(tree.seen) - seen_before)
    os.write(1, json.dumps(reply).encode())


def _describe(error: BaseException) -> _Raised:
    if isinstance(error, PatchkitError):
        return _Raised(type(error).__name__, error.what, error.why, error.hint)
    place = upstream_code.place(error)
    return _Raised(
        kind="ProofError",
        what=f"{place}upstream's code stops with {type(error).__name__}: {error}",
        why="it was edited by hand, or asks for something that the proof does not know",
        hint=_HINT,
    )
