"""Do the same on several nodes at once: eight take as long as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from patchkit.errors import PatchkitError
from patchkit.process import end_dialogues

N = TypeVar("N")
R = TypeVar("R")


def everywhere(nodes: Sequence[N], work: Callable[[N], R]) -> list[R | PatchkitError]:
    """Return for each node what ``work`` returns, or the error that it raised, in their order.

    An interrupt ends what runs on the nodes, and is raised.
    """

    def tried(node: N) -> R | PatchkitError:
        try:
            return work(node)
        except PatchkitError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(len(nodes), 1)) as pool:
        futures = [pool.submit(tried, node) for node in nodes]
        try:
            return [each.result() for each in futures]
        except BaseException:
            end_dialogues()
            raise


def all_of(results: Sequence[R | PatchkitError]) -> list[R]:
    """Return the results if all are there. Raises the first error; others are named in it."""
    failed = [each for each in results if isinstance(each, PatchkitError)]
    if not failed:
        return [each for each in results if not isinstance(each, PatchkitError)]
    first, *others = failed
    what = "\n".join([first.what, *(f"and {each.what}" for each in others)])
    raise type(first)(what, why=first.why, hint=first.hint)
