"""Disturb changes at each of their system calls, and look whether they were all or nothing.

`nox -s torture` tries every attack at every call, and writes its page.
"""

from __future__ import annotations

import os
import platform
import random
import re
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from e2e.torture.supervisor import ERRORS, SIGNALS, Call, Ended, supervise, unavailable
from e2e.torture.users import State, User, reported, snapshot, users
from patchkit.patching.recipe import load_recipe
from patchkit.source.archive import unpack
from patchkit.source.fetch import fetch
from patchkit.source.releases import read_lock

RELEASE = "0.24.0"
PAGE = Path(__file__).parents[3] / "docs" / "reliability.md"
NAMES = (
    "apply", "revert", "wheelhouse add", "wheelhouse fill", "wheelhouse prune", "env -o",
    "download",
)  # fmt: skip
_HEAD = """\
# What becomes of a change that is interrupted

This page shows that an interruption leaves your files whole. Afterwards they are the old ones or
the new ones, byte by byte, with their owner and mode, at once or after one further run of patchkit.
Its messages ("nothing was changed", "the commit was finished, 6 files") are true.
[SECURITY.md](../SECURITY.md) has the promise and its limits.

`nox -s torture` makes real changes in a child process: it patches and reverts vLLM {release}, adds
wheels to a wheelhouse and drops them. The kernel stops it at every system call that would change
the disk (seccomp's user notification), and the process gets a signal, or the call fails as on a
failing, a full or a read-only disk. A second fault hits its reaction to the first.

{system}, {count:,} tries. At each call: {attacks}.

"""
# What patchkit's own unfinished business looks like; it is nobody's file.
_SCRATCH = re.compile(
    r"(^|/)(transaction|journal|\.journal)(\.gone)?(/|$)|\.part(ial)?$"
)
_FAILED = 70  # of the supervisor: something that is no PatchkitError escaped


@dataclass
class Fault:
    """One thing that happens from the ``at``-th call on; a lasting one goes on happening."""

    kind: str
    at: int

    def __call__(self, number: int, call: Call, pid: int) -> int:
        if self.kind in SIGNALS:
            if number == self.at:
                os.kill(
                    pid, SIGNALS[self.kind]
                )  # the call that was asked about then goes on
            return 0
        lasting = self.kind in ("ENOSPC", "EROFS")
        due = number >= self.at if lasting else number == self.at
        spared = self.kind == "ENOSPC" and not call.allocates
        return ERRORS[self.kind] if due and not spared else 0


@dataclass
class Tried:
    """One attempt: where, and what was wrong afterwards, "" for nothing."""

    user: str
    attack: str
    where: str
    wrong: str = ""


def _disturbed(
    user: User, action: Callable[[], object], faults: Sequence[Fault] = ()
) -> tuple[Ended, list[Call]]:
    """Run an action of a user's under faults; return how it ended, and its calls."""
    calls: list[Call] = []

    def decide(call: Call, pid: int) -> int:
        calls.append(call)
        return next(filter(None, (fault(len(calls), call, pid) for fault in faults)), 0)

    return supervise(reported(action), user.root, decide), calls


def steps(user: User) -> int:
    """How many calls of a run can be disturbed."""
    user.prepare()
    ended, calls = _disturbed(user, user.act)
    assert (ended.code, ended.said) == (0, "done"), ended
    assert snapshot(user.root) == user.new
    return len(calls)


SINGLE = ("SIGKILL", "SIGINT", "SIGTERM", "EIO", "ENOSPC", "EROFS")
DOUBLE = (
    ("EIO", "EROFS"), ("EIO", "EIO"), ("EIO", "SIGKILL"), ("EIO", "SIGINT"),
    ("SIGINT", "EIO"), ("SIGINT", "SIGKILL"),
)  # fmt: skip
RECOVERY = ("SIGKILL", "SIGINT", "EIO", "EROFS")


def _tried(
    user: User, attack: str, faults: list[Fault], again: Fault | None = None
) -> Tried:
    """Try once, and look at what is left, once one further run has had its chance."""
    user.prepare()
    ended, calls = _disturbed(user, user.act, faults)
    last = calls[-1] if calls else Call("", "", creates=False)
    where = f"{'/'.join(str(each.at) for each in faults)} {last.name} {last.path}"
    tried = Tried(user.name, attack, where, _untrue(user, ended))
    if again is not None and not tried.wrong:
        ended, _ = _disturbed(user, user.settle, [again])
        tried.where += f" / {again.at}"
        tried.wrong = "recovery crashed" if ended.code == _FAILED else ""
    if tried.wrong or snapshot(user.root) in (user.old, user.new):
        return tried
    further, _ = _disturbed(user, user.settle)
    now = snapshot(user.root)
    if further.said != "done":
        tried.wrong = (
            f"first {ended.said or ended.code}; then the further run: {further.said}"
        )
    elif now not in (user.old, user.new):
        nearest = min(
            (user.old, user.new), key=lambda state: len(_difference(now, state))
        )
        tried.wrong = f"neither old nor new: {_difference(now, nearest)}"
    return tried


def _untrue(user: User, ended: Ended) -> str:
    """What was said and is not so."""
    if ended.code == _FAILED:
        return f"no PatchkitError: {ended.said}"
    now = _without_scratch(snapshot(user.root))
    old, new = map(_without_scratch, (user.old, user.new))
    if ended.said == "done" and now != new:
        return "said that it was done, and it is not"
    if "nothing was changed" in ended.said and now != old:
        return f"said that nothing was changed: {_difference(now, old)}"
    if ("was finished" in ended.said or "was written" in ended.said) and now != new:
        return f"said that it was finished: {_difference(now, new)}"
    return ""


def _without_scratch(state: State) -> dict[str, object]:
    """The files; an empty folder that is left over is nothing that anybody had."""
    files = {path: what for path, what in state.items() if not stat.S_ISDIR(what[0])}
    return {path: what for path, what in files.items() if not _SCRATCH.search(path)}


def _difference(now: State, wanted: State) -> str:
    return ", ".join(
        sorted(path for path in {*now, *wanted} if now.get(path) != wanted.get(path))
    )


def every(user: User, stride: int = 1, offset: int = 0) -> Iterator[Tried]:
    """All attacks on a user, at each of its calls, or at every ``stride``-th."""
    count, chance = steps(user), random.Random(f"{user.name}{stride}{offset}")

    def moments(number: int) -> range:
        return range(1 + (offset + number) % stride, count + 1, stride)

    for number, kind in enumerate(SINGLE):
        for at in moments(number):
            yield _tried(user, kind, [Fault(kind, at)])
    for number, (first, second) in enumerate(DOUBLE):
        for at in moments(number):
            faults = [Fault(first, at), Fault(second, at + chance.randint(1, 12))]
            yield _tried(user, f"{first}, then {second}", faults)
    for number, kind in enumerate(RECOVERY):
        for at in moments(number):
            again = Fault(kind, chance.randint(1, 40))
            attack = f"SIGKILL, then {kind} in recovery"
            yield _tried(user, attack, [Fault("SIGKILL", at)], again)


def main() -> int:
    """Try everything; write the page. The exit code is 1 if something failed."""
    if obstacle := unavailable():
        print(f"nothing was tried: {obstacle}")
        return 2
    started = time.monotonic()
    recipe = load_recipe("vllm")
    with tempfile.TemporaryDirectory(prefix="patchkit-torture-") as scratch:
        release = Path(scratch, f"vllm-{RELEASE}")
        unpack(fetch("vllm", RELEASE, read_lock(recipe.home / "lock.toml")), release)
        with ProcessPoolExecutor() as pool:
            jobs = [
                pool.submit(_all_of, name, release, Path(scratch, name))
                for name in NAMES
            ]
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
    """Return the page: how often each change was attacked, and what failed."""
    attempts = [*tried]
    counted = Counter(each.user for each in attempts)
    failed = Counter(each.user for each in attempts if each.wrong)
    head = _HEAD.format(
        release=RELEASE,
        system=f"Linux {platform.release().split('-')[0]} on {platform.machine()}",
        count=counted.total(),
        attacks="; ".join(dict.fromkeys(each.attack for each in attempts)),
    )
    rows = [
        f"| {name} | {count} | {counted[name]:,} | {failed[name]} |"
        for name, count in calls.items()
    ]
    return head + "\n".join(
        ["| change | calls | tries | failed |", "|---|--:|--:|--:|", *rows, ""]
    )


if __name__ == "__main__":
    sys.exit(main())
