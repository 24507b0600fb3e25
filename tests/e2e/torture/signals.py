"""Signals from outside, at any moment, to the command line itself on a whole release."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from e2e.torture.attacks import Tried
from e2e.torture.supervisor import SIGNALS

_PARTS = ("CMakeLists.txt", "PKG-INFO", "setup.py", "cmake", "csrc", "vllm")
_CODES = {"SIGKILL": -9, "SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
_WRONG = re.compile(r"Traceback|internal error|Aborted!")


class Tree:
    """A private tree of a release, of hard links, and how to look at it."""

    def __init__(self, release: Path, root: Path) -> None:
        self.root = root
        self._known: dict[tuple[int, ...], str] = {}
        root.mkdir()
        for part in _PARTS:
            if (release / part).is_dir():
                shutil.copytree(release / part, root / part, copy_function=os.link, symlinks=True)
            else:
                (root / part).hardlink_to(release / part)

    def run(self, verb: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "patchkit", verb, "--vllm-src", str(self.root)]
        quiet = {key: value for key, value in os.environ.items() if key != "FORCE_COLOR"}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=quiet, stdout=pipe, stderr=pipe, text=True)

    def files(self) -> dict[str, tuple[int, int, str]]:
        found = {}
        for folder, _, files in os.walk(self.root):
            for name in files:
                place = Path(folder, name)
                status = place.lstat()
                key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
                if key not in self._known:
                    self._known[key] = hashlib.sha256(place.read_bytes()).hexdigest()
                path = place.relative_to(self.root).as_posix()
                if not path.startswith(".patchkit/transaction"):
                    found[path] = (status.st_mode, status.st_uid, self._known[key])
        return found


def tries(release: Path, scratch: Path, count: int) -> Iterator[Tried]:
    """``count`` runs of apply and revert in turn, each with one signal at a random moment."""
    tree, chance = Tree(release, scratch / "whole"), random.Random(count)
    old = tree.files()
    took = {}
    for verb in ("apply", "revert"):
        started = time.monotonic()
        assert tree.run(verb).wait() == 0
        took[verb] = time.monotonic() - started
        if verb == "apply":
            new = tree.files()
    assert tree.files() == old
    for number in range(count):
        verb = ("apply", "revert")[number % 2]
        if verb == "revert":
            assert tree.run("apply").wait() == 0
        yield _tried(tree, verb, chance, took[verb], (old, new))
        further = tree.run("revert")
        said = further.communicate()[1]
        if tree.files() != old:
            yield Tried("revert", "a further run", said, "the tree is not what upstream shipped")


def _tried(
    tree: Tree, verb: str, chance: random.Random, seconds: float, states: tuple[object, object]
) -> Tried:
    name = chance.choice(list(SIGNALS))
    # Half of them in the second half, where the commit is.
    moment = seconds * (chance.random() if chance.random() < 0.5 else chance.uniform(0.5, 1))
    process = tree.run(verb)
    time.sleep(moment)
    process.send_signal(SIGNALS[name])
    _, said = process.communicate()
    tried = Tried(verb, f"{name} from outside", f"after {moment:.3f} s")
    now, (old, new) = tree.files(), states
    before, after = (old, new) if verb == "apply" else (new, old)
    if process.returncode not in (0, _CODES[name]):
        # Python itself, before it has read a line of patchkit's, dies of the signal.
        if process.returncode != -SIGNALS[name] and "patchkit" in said:
            tried.wrong = f"exit code {process.returncode}: {said}"
    elif _WRONG.search(said) and "patchkit" in said:
        tried.wrong = said
    elif "nothing was changed" in said and now != before:
        tried.wrong = "said that nothing was changed"
    elif ("was finished" in said or process.returncode == 0) and now != after:
        tried.wrong = "said that it was finished"
    return tried
