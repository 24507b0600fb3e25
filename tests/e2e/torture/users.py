"""Who changes files: each with a state before, a change, and what makes a cut one whole again."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import requests

from e2e.torture.supervisor import supervise
from patchkit.apply import plan_for, revert
from patchkit.digests import sha256_of
from patchkit.durable.atomic import continuing
from patchkit.durable.lock import locked
from patchkit.durable.signals import Interrupted, raise_interrupts
from patchkit.errors import PatchkitError, translated
from patchkit.patching.commit import commit_plan
from patchkit.patching.fix import Request
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import journal_of, open_workspace, read_workspace
from patchkit.runtime.envfile import env_file as envfile
from patchkit.source.detect import detect, state_folder
from patchkit.source.fetch import transfer
from patchkit.target import targets
from patchkit.wheel.file.wheelfile import WheelName
from patchkit.wheel.wheelhouse import storage
from patchkit.wheel.wheelhouse.storage import (
    Kind,
    ManifestEntry,
    add_wheel,
    read_settled,
    replace_dependencies,
)
from patchkit.wheel.wheelhouse.verify import prune_wheelhouse
from support.wheels import write_wheel

MARKERS = (
    "setup.py",
    "CMakeLists.txt",
    "cmake/utils.cmake",
    "vllm/__init__.py",
    "PKG-INFO",
)
OURS, NEWER = "2.29.7+gb10.abc123", "2.29.7+gb10.def456"


def reported(action: Callable[[], object]) -> Callable[[], str]:
    """The action, with what a user would be told as its result."""

    def run() -> str:
        raise_interrupts()
        try:
            action()
        except PatchkitError as error:
            return f"error: {error.what}"
        except Interrupted as interrupt:
            return str(interrupt)
        return "done"

    return run


State = MappingProxyType  # path → (kind and mode, owner, group, content)


@dataclass(frozen=True)
class User:
    """``act`` changes what is below ``root``; ``settle`` makes one that was cut short whole.

    ``old`` and ``new`` are the states before and after, byte by byte.
    """

    name: str
    root: Path
    template: Path
    act: Callable[[], object]
    settle: Callable[[], object]
    old: State
    new: State

    def prepare(self) -> None:
        if snapshot(self.root) != self.old:
            _restore(self.template, self.root)


def snapshot(root: Path) -> State:
    """Everything below a folder: kind and mode, owner, group, content."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            place = Path(folder, name)
            status = place.lstat()
            data = place.read_bytes() if stat.S_ISREG(status.st_mode) else b""
            key = place.relative_to(root).as_posix()
            found[key] = (status.st_mode, status.st_uid, status.st_gid, data)
    return MappingProxyType(found)


def _restore(template: Path, root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(template, root, symlinks=True)
    for folder, folders, files in os.walk(template):
        for name in (*folders, *files):
            status = Path(folder, name).lstat()
            copy = root / Path(folder, name).relative_to(template)
            os.chown(copy, status.st_uid, status.st_gid)


def _apart(action: Callable[[], object], root: Path) -> None:
    """Run in a process of its own, like everything that is tried."""
    ended = supervise(reported(action), root)
    assert ended.said == "done", ended


def _user(
    name: str, root: Path, act: Callable[[], object], settle: Callable[[], object]
) -> User:
    """A user whose state before lies in ``root`` now."""
    template = root.with_name(f"{root.name}.{name.replace(' ', '-')}")
    shutil.copytree(root, template, symlinks=True)
    _restore(template, root)
    old = snapshot(root)
    _apart(act, root)
    user = User(name, root, template, act, settle, old, snapshot(root))
    assert user.old != user.new
    return user


@contextmanager
def users(release: Path, scratch: Path) -> Iterator[list[User]]:
    """All of them, working below ``scratch``; ``release`` is an unpacked vLLM that has fixes."""
    umask = os.umask(0o022)
    try:
        yield [
            *_of_a_tree(release, scratch / "tree"),
            *_of_a_wheelhouse(scratch / "wheelhouse", scratch / "wheels"),
            *_of_a_file(scratch / "env", scratch / "cache"),
        ]
    finally:
        os.umask(umask)


def _of_a_tree(release: Path, root: Path) -> Iterator[User]:
    recipe = load_recipe("vllm")
    request = Request(
        target=targets()["gb10"], arch="native", also=frozenset({"moe_configs"})
    )
    plan = plan_for(open_workspace(release, "vllm"), recipe, request)
    for path in {
        *MARKERS,
        *(each for each, (before, _) in plan.texts.items() if before is not None),
    }:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(release / path, root / path)
    if os.geteuid() == 0:  # the tree of a user who runs sudo
        for place in (root, *root.rglob("*")):
            os.chown(place, 1000, 1000)

    def recover() -> None:
        tree = detect(root, "vllm")
        with locked(tree.root):
            journal_of(tree, state_folder(tree)).recover()

    def apply() -> None:
        recover()
        with locked(root):
            workspace = read_workspace(detect(root, "vllm"), writing=True)
            commit_plan(workspace, recipe, plan, ("not run",))

    yield _user("apply", root, apply, recover)
    yield _user("revert", root, lambda: revert(root, "vllm"), recover)


def _of_a_wheelhouse(house: Path, wheels: Path) -> Iterator[User]:
    old, new = (
        write_wheel(wheels, each, files={"a": each.encode() * 3000})
        for each in (OURS, NEWER)
    )
    other = write_wheel(wheels, "1.0", project="vllm")
    torch = [write_wheel(wheels / "torch", f"{n}.0", project="torch") for n in (1, 2)]

    def settle() -> None:
        with storage.hold_wheelhouse(house):
            storage.wheelhouse_journal(house).recover()

    def fill(wheel: Path) -> None:
        fresh = ManifestEntry(
            name=WheelName(wheel.name),
            sha256=sha256_of(wheel),
            size=wheel.stat().st_size,
            facts={},
            kind=Kind.DEPENDENCY,
        )
        replace_dependencies(house, read_settled(house), [fresh], [wheel])

    def stock() -> None:
        add_wheel(house, other, {})
        add_wheel(house, old, {})
        fill(torch[0])

    _apart(stock, house)
    yield _user(
        "wheelhouse add",
        house,
        lambda: add_wheel(house, new, {"target": "gb10"}),
        settle,
    )
    yield _user("wheelhouse fill", house, lambda: fill(torch[1]), settle)
    yield _user(
        "wheelhouse prune",
        house,
        lambda: prune_wheelhouse(house, drop=["vllm"]),
        settle,
    )


def _of_a_file(env: Path, cache: Path) -> Iterator[User]:
    for folder in (env, cache):
        folder.mkdir()
        (folder / "head.env").write_text("OLD=1\n")
        (folder / "head.env").chmod(0o640)
    place, data = cache / "release.tar.gz", bytes(range(256)) * 3000

    def write() -> None:
        envfile.write(env / "head.env", "NEW=2\n" * 2000, force=True, private=False)

    @contextmanager
    def ask(start: int) -> Iterator[requests.Response]:
        response = requests.Response()
        response.status_code = 206 if start else 200
        response.raw = io.BytesIO(data[start:])
        response.headers["Content-Length"] = str(len(data) - start)
        yield response

    def download() -> None:
        sha256 = hashlib.sha256(data).hexdigest()
        with translated(at=place), continuing(place) as stream:
            assert transfer(stream, ask, sha256)[0] == sha256

    yield _user("env -o", env, write, write)
    yield _user("download", cache, download, download)
