"""Read from a wheelhouse what nodes install: for a cluster, whose room knows no wheelhouse."""

from __future__ import annotations

from pathlib import Path

from patchkit.cluster.agent.wheel_store import NodeWheel, WheelLock
from patchkit.errors import PatchkitError, UsageError
from patchkit.finding import Level
from patchkit.quoting import quoted
from patchkit.reading import read_text
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.wheelhouse.manifest import REQUIREMENTS, Kind, ManifestEntry
from patchkit.wheel.wheelhouse.verify import verify_wheelhouse

_LARGEST = 16 << 20  # bytes of requirements.txt


def wheel_lock(house: Path) -> WheelLock:
    """Return what a wheelhouse installs on a node.

    Raises the worst of its findings, UsageError for one that is not filled or not whole.
    """
    done = verify_wheelhouse(house)
    errors = [each for each in done.findings if each.level is Level.ERROR]
    if errors:
        worst = max(errors, key=lambda each: each.kind.exit_code)
        more = f" ({len(errors)} findings)" if len(errors) > 1 else ""
        kind: type[PatchkitError] = worst.kind
        hint = quoted("patchkit", "verify", house)
        raise kind(f"{house}: {worst.where}: {worst.what}{more}", why=worst.why, hint=hint)
    apart = [entry.name.pinned for entry in done.entries if not entry.held]
    releases = {
        str(e.facts["python"])
        for e in done.entries
        if e.facts.get("python") and e.kind is Kind.DEPENDENCY
    }
    if not done.entries or done.unmet or apart or len(releases) != 1:
        lacks = [*done.unmet, *apart]
        raise UsageError(
            f"{house}: is not filled" + (f": {', '.join(lacks[:3])} is not in it" if lacks else ""),
            why="a node without a network installs what the wheelhouse holds, all of it",
            hint=quoted("patchkit", "wheelhouse", "fill", "--dir", house),
        )
    return WheelLock(
        requirements=read_text(house / REQUIREMENTS, limit=_LARGEST, follow=False),
        python=".".join(releases.pop().split(".")[:2]),
        wheels=tuple(_wheel(house, each) for each in done.entries),
    )


def _wheel(house: Path, entry: ManifestEntry) -> NodeWheel:
    with WheelFile(house / entry.filename) as wheel:
        unpacked = sum(each.file_size for each in wheel.members.values())
    return NodeWheel(
        name=entry.filename,
        sha256=entry.sha256,
        size=entry.size,
        unpacked=unpacked,
        cpus=tuple(sorted(entry.name.cpus)),
    )
