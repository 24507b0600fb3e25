"""`nox -s torture`: every attack at every call; writes its page."""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from e2e.torture.attacks import Tried, every, steps
from e2e.torture.supervisor import unavailable
from e2e.torture.users import users
from patchkit.patching.recipe import load_recipe
from patchkit.source.archive import unpack
from patchkit.source.fetch import fetch
from patchkit.source.releases import read_lock

RELEASE = "0.24.0"
PAGE = Path(__file__).parents[3] / "docs" / "reliability.md"
NAMES = (
    "apply", "revert", "wheelhouse add", "wheelhouse fill", "wheelhouse prune", "net apply",
    "net undo", "env -o", "download",
)  # fmt: skip
_HEAD = """\
# What becomes of a change that is interrupted

A change is all or nothing: afterwards the files are the old ones or the new ones, byte by byte,
with their owner and mode, at once or after one further run of patchkit. What it says of itself
("nothing was changed", "the commit was finished, 6 files") is so. [SECURITY.md](../SECURITY.md) has
the promise and its limits; `patchkit/durable/journal.py` has the way it is kept.

`nox -s torture` tries to break that. A child process makes a real change: vLLM {release} is
patched and reverted, wheels are put into a wheelhouse and dropped, a netplan file is written and
taken back. The kernel stops it at every system call that would change the disk and asks what shall
happen (seccomp's user notification): the process gets a signal, the call fails as on a failing, a
full or a read-only disk, and a second fault strikes what it does about the first.

{system}, {count:,} tries, {failed} failed. Calls that change the disk: {calls}.

"""


def main() -> int:
    """Try everything; write the page. The exit code is 1 if something failed."""
    if obstacle := unavailable():
        print(f"nothing was tried: {obstacle}")
        return 2
    started = time.monotonic()
    recipe = load_recipe()
    with tempfile.TemporaryDirectory(prefix="patchkit-torture-") as scratch:
        release = Path(scratch, f"vllm-{RELEASE}")
        unpack(fetch("vllm", RELEASE, read_lock(recipe.home / "lock.toml")), release)
        with ProcessPoolExecutor() as pool:
            jobs = [pool.submit(_all_of, name, release, Path(scratch, name)) for name in NAMES]
            results = [job.result() for job in jobs]
        calls = {name: count for name, (count, _) in zip(NAMES, results, strict=True)}
        tried = [each for _, found in results for each in found]
    failed = [each for each in tried if each.wrong]
    for each in failed:
        print(f"{each.user}, {each.attack}, {each.where}: {each.wrong}")
    PAGE.write_text(_page(tried, calls), encoding="utf-8")
    minutes = (time.monotonic() - started) / 60
    print(f"{len(tried)} tries, {len(failed)} failed, {minutes:.0f} minutes: {PAGE}")
    return bool(failed)


def _all_of(name: str, release: Path, scratch: Path) -> tuple[int, list[Tried]]:
    """The calls of one user, and all attacks on it."""
    scratch.mkdir()
    with users(release, scratch) as found:
        (user,) = (each for each in found if each.name == name)
        return steps(user), list(every(user))


def _page(tried: Iterable[Tried], calls: dict[str, int]) -> str:
    """Return the page: attack by change, and how many of an attack failed."""
    counted = Counter((each.user, each.attack) for each in tried)
    failed = Counter((each.user, each.attack) for each in tried if each.wrong)
    head = _HEAD.format(
        release=RELEASE,
        system=f"Linux {platform.release().split('-')[0]} on {platform.machine()}",
        count=counted.total(),
        failed=failed.total(),
        calls=", ".join(f"{name} {count}" for name, count in calls.items()),
    )
    lines = [f"| attack | {' | '.join(NAMES)} | failed |", f"|---|{'---:|' * (len(NAMES) + 1)}"]
    for attack in dict.fromkeys(attack for _, attack in counted):
        cells = [str(counted[name, attack] or "") for name in NAMES]
        wrong = sum(failed[name, attack] for name in NAMES)
        lines.append(f"| {attack} | {' | '.join(cells)} | {wrong} |")
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
