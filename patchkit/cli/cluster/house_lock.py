"""Read the wheels that a wheelhouse installs on a node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from patchkit.cluster.agent.installation import NodeWheel, WheelLock
from patchkit.errors import UsageError
from patchkit.finding import Level
from patchkit.patching.recipe import load_recipe
from patchkit.quoting import quoted
from patchkit.reading import read_text
from patchkit.wheel.file.wheelfile import ANY, WheelFile
from patchkit.wheel.wheelhouse.storage import REQUIREMENTS, Kind, ManifestEntry
from patchkit.wheel.wheelhouse.verify import Verified, verify_wheelhouse

_LARGEST = 16 << 20  # bytes of requirements.txt
_ALL_OF_IT = "a node without a network installs what the wheelhouse holds, all of it"


def read_house_lock(house: Path) -> WheelLock:
    """Return the wheels that a wheelhouse installs on a node, with their requirements.

    Raises the worst of its findings, or UsageError if it is empty or not filled.
    """
    verified = verify_wheelhouse(house)
    _require_whole(house, verified)

    entries = verified.entries
    cpus = {cpu for entry in entries for cpu in entry.name.cpus} - {ANY}
    pythons = _fact_values(entries, Kind.DEPENDENCY, "python")
    missing = [entry.name.pinned for entry in entries if not entry.held]
    missing = [*verified.unmet, *missing]
    if missing or len(pythons) != 1 or len(cpus) > 1:
        raise _not_filled(house, missing, cpus)

    targets = _fact_values(entries, Kind.BUILT, "target")
    release = pythons.pop().split(".")
    return WheelLock(
        requirements=read_text(house / REQUIREMENTS, limit=_LARGEST, follow=False),
        cpu="".join(cpus),
        python=".".join(release[:2]),
        wheels=tuple(_node_wheel(house, entry) for entry in entries),
        target=targets.pop() if len(targets) == 1 else "",
        native=bool(_fact_values(entries, Kind.BUILT, "native")),
    )


def _fact_values(entries: Sequence[ManifestEntry], kind: Kind, name: str) -> set[str]:
    """Return the values of a fact of wheels, without empty ones."""
    values = set()
    for entry in entries:
        if entry.kind is kind and entry.facts.get(name):
            values.add(str(entry.facts[name]))
    return values


def _not_filled(house: Path, missing: Sequence[str], cpus: Iterable[str]) -> UsageError:
    lacks = ", ".join(missing[:3]) or "nothing"
    machines = ", ".join(sorted(cpus))
    return UsageError(
        f"{house}: is not filled, for one CPU and one Python: it lacks {lacks}, and has wheels "
        f"for {machines}",
        why=_ALL_OF_IT,
        hint=quoted("patchkit", "wheelhouse", "fill", "--dir", house),
    )


def _require_whole(house: Path, verified: Verified) -> None:
    """Raise the worst finding of a wheelhouse, or UsageError for an empty one."""
    errors = [row for row in verified.findings if row.level is Level.ERROR]
    if errors:
        worst = max(errors, key=lambda error: error.kind.exit_code)
        what = f"{house}: {worst.where}: {worst.what}"
        hint = quoted("patchkit", "verify", house)
        raise worst.kind(what, why=worst.why, hint=hint)

    if not verified.entries:
        newest = f"vllm=={load_recipe().newest}"
        repack = quoted("patchkit", "repack", newest, "--dir", house)
        fill = quoted("patchkit", "wheelhouse", "fill", "--dir", house)
        what = f"{house}: holds no wheels"
        raise UsageError(what, why=_ALL_OF_IT, hint=f"{repack} && {fill}")


def _node_wheel(house: Path, entry: ManifestEntry) -> NodeWheel:
    with WheelFile(house / entry.filename) as wheel:
        unpacked = sum(member.file_size for member in wheel.members.values())

    return NodeWheel(
        name=entry.filename, sha256=entry.sha256, size=entry.size, unpacked=unpacked
    )
