"""Sources that a build for a device has no use for, so that it need not have them.

vLLM has no code for the device in it, or does not choose it there, or builds nothing of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from packaging.version import Version

from patchkit.errors import DriftError, UsageError
from patchkit.patching.fix import Request
from patchkit.recipes.vllm.build import KnownSource, known_externals
from patchkit.recipes.vllm.leave_out import asked_targets, leave_out
from patchkit.source.tree import SourceTree


def idle_sources(tree: SourceTree, request: Request, named: Collection[str] = ()) -> dict[str, str]:
    """Return option → reason, of the optional sources that the build can do without at no cost.

    Options that are ``named`` are wanted nonetheless. What is not known to leave a tree cleanly,
    such as one that upstream changed, stays in.
    """
    asked = asked_targets(tree)
    found = {
        known.option: _idle(known, tree.version, request, asked)
        for known in known_externals()
        if known.optional and known.option not in named and tree.exists(known.file)
    }
    idle = {}
    for option, reason in found.items():
        if reason:
            with contextlib.suppress(DriftError, UsageError):
                leave_out(tree, [known for known in known_externals() if known.option == option])
                idle[option] = reason
    return idle


def _idle(known: KnownSource, version: Version, request: Request, asked: set[str]) -> str:
    major = request.target.major
    if not known.serves(major, version):
        return f"of no use to {request.target.title}"
    if not asked & set(known.targets):
        return "setup.py builds nothing of it"
    for reason in known.unused:
        chosen = reason.fix in request.only if request.only else reason.fix not in request.skip
        if major in reason.majors and chosen:
            return f"vLLM does not choose it there, by the fix {reason.fix}"
    return ""
