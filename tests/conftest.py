"""Real releases, private trees of them, and patchkit as its users run it.

Releases come through patchkit's own locked fetch. Without the package index, tests of releases that
are not in the cache are skipped. `support.selection` says which ones are asked about.
"""

import fcntl
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import pytest
from hypothesis import settings

import patchkit as package
from patchkit.errors import HostError, SourceError, StorageError
from patchkit.patching.fix import Request
from patchkit.patching.recipe import load_recipe
from patchkit.source.archive import unpack
from patchkit.source.fetch import fetch
from patchkit.source.releases import read_lock
from patchkit.source.resolve import find_origin
from patchkit.target import targets
from support.debian import keep_nccl
from support.forking import ReadyPatchkit
from support.selection import DAILY, MODES, RELEASES, SUPPORTED
from support.wheels import write_wheel

# Whoever starts the tests in the background, or with nohup, has these ignored; patchkit leaves that
# so, and its tests send them.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)

# The default run asks the same examples everywhere, so that a change fails by what it changed;
# `nox -s properties` searches for new ones.
settings.register_profile(
    "same", derandomize=True, deadline=None
)  # a loaded machine is no defect
settings.register_profile("search", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

_PARTS = ("CMakeLists.txt", "PKG-INFO", "setup.py", "cmake", "csrc", "vllm")

# tools/ is found, but patchkit only where it is not installed: the tests are of what is installed.
sys.path.append(str(Path(__file__).parents[1]))


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items):
    """Leave releases that the default run does not ask to `nox -s e2e`."""
    for item in items:
        version = (
            item.callspec.params.get("version") if hasattr(item, "callspec") else None
        )
        others = set(SUPPORTED) - set(DAILY)
        if (
            item.get_closest_marker("releases")
            and isinstance(version, str)
            and version in others
        ):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(
    scope="module",  # a module's tests come release by release, so what was parsed stays cached
    params=RELEASES,
)
def version(request):
    return request.param


@pytest.fixture(params=MODES)
def arch(request):
    return request.param


@pytest.fixture(scope="session")
def recipe():
    return load_recipe("vllm")


@pytest.fixture(scope="session")
def ask():
    """A request for a GB10, or another target: ``ask("family", skip={"x"})``."""

    def make(arch="native", *, target="gb10", **selection):
        chosen = {name: frozenset(ids) for name, ids in selection.items()}
        return Request(target=targets()[target], arch=arch, **chosen)

    return make


@pytest.fixture(scope="session")
def fetched():
    """What a lock names, in the cache: ``fetched("vllm", entry)``; skips if it cannot be had."""
    trouble = []  # one failed download is enough to know that there is no index

    def get(project, entry):
        try:
            return fetch(
                project, entry.version, {entry.version: entry}, offline=bool(trouble)
            )
        except StorageError as error:
            trouble.append(error.what)
        except SourceError:
            assert trouble
        return pytest.skip(f"{entry.filename} is not in the cache: {trouble[0]}")

    return get


@pytest.fixture(scope="session")
def sdist(recipe, fetched):
    """The archive of a release in the cache: ``sdist("0.24.0")``."""
    lock = read_lock(recipe.home / "lock.toml")
    return lambda version: fetched(recipe.project, lock[version])


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Make something for all workers of this run: ``once("name", make)`` returns the path.

    ``make`` gets a path that is not there yet. Nobody writes to what is there afterwards.
    """
    shared = _shared(tmp_path_factory)
    shared.mkdir(exist_ok=True)

    @cache
    def made(name, make):
        place, draft = shared / name, shared / f"{name}.draft"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                shutil.rmtree(draft, ignore_errors=True)  # of a worker that was killed
                make(draft)
                draft.rename(place)
        return place

    return made


def _shared(factory):
    base = factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"


def pytest_sessionfinish(session):
    """Remove what the workers shared: pytest keeps the folders of three runs, and it is large."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(_shared(session.config._tmp_path_factory), ignore_errors=True)


@pytest.fixture(scope="session")
def release(sdist, once):
    """The pristine tree of a release, unpacked once: ``release("0.24.0")``. Nobody writes to it."""

    @cache
    def unpacked(version):
        archive = sdist(version)
        return once(f"vllm-{version}", partial(unpack, archive))

    return unpacked


@pytest.fixture
def tree(release, tmp_path):
    """A private tree of what patchkit reads: ``tree("0.24.0")``, or ``tree("0.24.0", name="b")``.

    Its files are hard links to the release's.
    """
    made = []

    def linked(version, *, name="tree"):
        root = tmp_path / name
        root.mkdir()
        made.append(root)
        for part in _PARTS:
            place = release(version) / part
            if place.is_dir():
                shutil.copytree(
                    place, root / part, copy_function=os.link, symlinks=True
                )
            else:
                (root / part).hardlink_to(place)
        return root

    yield linked
    # pytest keeps temporary folders of several runs; thousands of links each would add up.
    for root in made:
        shutil.rmtree(root)


@pytest.fixture(scope="session")
def nccl_release(once):
    """The pristine tree of NCCL 2.29.7 as Debian has it. Nobody writes to it.

    Skips if neither the cache nor the distribution nor upstream has it.
    """
    keep_nccl()
    try:
        origin = find_origin("nccl", "nccl==2.29.7")
    except (
        SourceError,
        StorageError,
        HostError,
    ) as error:  # no archive, no network, no git
        pytest.skip(f"NCCL 2.29.7: {error.what}")
    return once("nccl-2.29.7", partial(unpack, origin.path))


@pytest.fixture
def nccl(nccl_release, tmp_path):
    """Make a private tree of it, of hard links: ``nccl()``."""
    place = tmp_path / "nccl"
    return partial(
        shutil.copytree, nccl_release, place, copy_function=os.link, symlinks=True
    )


@pytest.fixture(scope="session")
def rewrite():
    """Replace a file of a tree, never writing into the release behind the link."""

    def write(place, data):
        bits = stat.S_IMODE(place.stat().st_mode)
        place.unlink()
        place.write_bytes(data if isinstance(data, bytes) else data.encode())
        place.chmod(bits)

    return write


@pytest.fixture(scope="session")
def snapshot():
    """Every path below a folder: its mode, and the sha256 of what is in it."""
    # Links of one file have one inode, so each release is read once per session.
    known = {}

    def content(path, status):
        if stat.S_ISLNK(status.st_mode):
            return oct(status.st_mode), str(Path(path).readlink())
        if stat.S_ISDIR(status.st_mode):
            return oct(status.st_mode), ""
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if key not in known:
            known[key] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        return oct(status.st_mode), known[key]

    def take(root):
        return {
            path.removeprefix(f"{root}/"): content(path, os.lstat(path))
            for folder, folders, files in os.walk(root)  # twice as quick as Path.rglob
            for path in (f"{folder}/{name}" for name in (*folders, *files))
        }

    return take


@pytest.fixture
def environment():
    """What a command is run with: patchkit importable from anywhere, nothing of a terminal."""
    return _environment()


def _environment():
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR")
    }
    return {**inherited, "PYTHONPATH": str(Path(package.__file__).parents[1])}


@pytest.fixture(scope="session")
def ready_patchkit():
    """What starts patchkit quickly."""
    ready = ReadyPatchkit(_environment())
    yield ready
    ready.end()


@pytest.fixture
def cli(environment, tmp_path, ready_patchkit):
    """Run patchkit: ``cli("apply", "--vllm-src", tree)``. Checks the exit code.

    A traceback is never right.
    """

    def run(*arguments, rc=0, env=None, cwd=tmp_path):
        words = [*map(str, arguments)]
        done = ready_patchkit.run(words, cwd=cwd, env={**environment, **(env or {})})
        said = f"{' '.join(done.args)}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, said
        assert done.returncode in (rc if isinstance(rc, tuple) else (rc,)), said
        return done

    return run


@pytest.fixture(scope="session")
def git():
    """Run git in a folder, without the user's settings: ``git(folder, "log")``."""
    settings = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost"]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}

    def run(folder, *arguments, stdin=""):
        done = subprocess.run(
            [*command, *map(str, arguments)],
            cwd=folder,
            env={
                **inherited,
                **settings,
                "GIT_CEILING_DIRECTORIES": str(folder.parent),
            },
            input=stdin.encode(),
            capture_output=True,
        )
        assert done.returncode == 0, f"git {arguments}: {done.stderr.decode()}"
        return done.stdout.decode()

    return run


@pytest.fixture
def house(tmp_path):
    return tmp_path / "wheelhouse"


@pytest.fixture
def made(tmp_path):
    """A wheel outside of the wheelhouse: ``made("2.29.7")``."""
    return lambda version, **more: write_wheel(tmp_path / "made", version, **more)


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of a given size; skips where that is not permitted."""
    mounted = []

    def mount(options):
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            pytest.skip(
                f"mounting is not permitted here: {result.stderr.splitlines()[0]}"
            )
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)
