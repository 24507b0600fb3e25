"""Get one commit of a git repository as an archive, with every object verified by git."""

import configparser
import contextlib
import os
import re
import tempfile
from pathlib import Path
from posixpath import normpath

from patchkit.durable.atomic import replacing
from patchkit.errors import (
    HashMismatchError,
    SourceError,
    StorageError,
    UsageError,
    translated,
)
from patchkit.follow import Completed, Resources
from patchkit.frozen import Values, positional
from patchkit.process import attempt

_COMMIT = r"[0-9a-f]{40}"
_GIT_URL = r"git\+([a-z][a-z0-9+.-]*://[^/]*(?:/[^@]*)?)(?:@([^@]*))?"
_TIMEOUT_S = 900
# Limits for git while it reads the diffs of a user.
_GIT_RESOURCES = Resources(memory=2 << 30, processor=60, written=64 << 20)
# With these, git writes exactly the bytes of the commit, whatever its .gitattributes say.
_ATTRIBUTES = "* -text -ident -filter -export-subst -export-ignore\n"
# Make git fetch no missing objects, since the settings of a checkout may name a program for that.
NO_FETCH = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
_PLAIN = (
    "-c",
    "core.autocrlf=false",
    "-c",
    "core.symlinks=true",
    "-c",
    "tar.umask=0022",
)


@positional
class GitSource:
    """The URL of a repository, without ``git+``, and the full id of a commit."""

    url: str
    commit: str


def parse_git(spec: str) -> GitSource | None:
    """Read ``git+URL@COMMIT``; return None for any other text.

    Raises UsageError if COMMIT is missing or is no full commit id, such as a tag or branch.
    """
    # An @ before the host ends a user name, not the URL.
    match = re.fullmatch(_GIT_URL, spec)
    if match is None:
        return None

    url = match[1]
    name = match[2] or ""
    if not re.fullmatch(_COMMIT, name):
        raise UsageError(
            f"{url}: {name!r} is not a commit",
            why="tags and branches can be moved, and upstream has moved a release's tag",
            hint=f"write git+{url}@ and the 40 hex digits of the commit "
            "(git ls-remote shows them)",
        )
    return GitSource(url, name)


def commit_archive(
    url: str, commit: str, *, cache: Path, prefix: str, offline: bool
) -> Path:
    """Return a tar archive of the files of a commit, in a folder ``prefix``.

    Only this commit is fetched, without its history, and it is kept in ``cache``. On every call,
    git verifies all its objects. Raises SourceError if the commit is not in the cache and
    ``offline`` is set, HashMismatchError if the cache is damaged, HostError if git is not
    installed, StorageError if network or disk fail.
    """
    repository = cache / "git" / commit
    if not (repository / "HEAD").is_file():
        if offline:
            raise SourceError(
                f"the commit {commit} is not in the cache, and offline it cannot be fetched",
                hint="run once without --offline",
            )
        _fetch_commit(url, commit, repository)

    words = ("fsck", "--full", "--no-dangling", "--no-progress", commit)
    done = _call_git(repository, *words)
    if done.status:
        raise HashMismatchError(
            f"{repository}: is damaged: {done.trouble}",
            why="a file in the cache was changed, or the disk failed",
            hint=f"remove {repository}, then run again",
        )

    archive = cache / f"{prefix}-{commit}.tar"
    with translated(at=archive), replacing(archive) as file:
        _call_git(
            repository,
            *_PLAIN,
            "archive",
            "--format=tar",
            f"--prefix={prefix}/",
            f"--output={file.name}",
            commit,
            check=True,
        )
    return archive


@positional
class Submodule:
    """A repository inside another one: its path there, its URL, and its commit."""

    path: str
    url: str
    commit: str


def submodules(url: str, commit: str, *, cache: Path) -> tuple[Submodule, ...]:
    """Return the submodules of a commit that ``commit_archive`` has put into the cache.

    The commit ids of the submodules are part of the verified commit. Raises SourceError if
    .gitmodules has no URL for a submodule.
    """
    repository = cache / "git" / commit
    listing = _call_git(repository, "ls-tree", "-r", "-z", "--full-tree", commit).output
    # 160000 is the mode of a submodule in a git tree; its id is a commit of the other repository.
    rows = [line for line in listing.split("\0") if line.startswith("160000 ")]
    if not rows:
        return ()

    urls = _submodule_urls(repository, commit)
    scheme, _, home = url.partition("://")
    submodules = []
    for row in rows:
        head, _, path = row.partition("\t")
        target = urls.get(path)
        if target is None:
            what = f".gitmodules does not say where {path} comes from"
            raise SourceError(f"{url}: {what}")
        if target.startswith(("./", "../")):  # relative to the repository's URL
            target = f"{scheme}://{normpath(f'{home}/{target}')}"
        submodules.append(Submodule(path, target, head.split()[2]))
    return tuple(submodules)


def _submodule_urls(repository: Path, commit: str) -> Values:
    """Return path → URL for the submodules in .gitmodules."""
    parser = configparser.RawConfigParser(strict=False)
    blob = f"{commit}:.gitmodules"
    with contextlib.suppress(configparser.Error):  # then the URL of each is missing
        parser.read_string(_call_git(repository, "cat-file", "blob", blob).output)
    rows = [row for row in parser.values() if {"path", "url"} <= row.keys()]
    return {row["path"]: row["url"] for row in rows}


def read_blob(root: Path, blob: str) -> str:
    """Return the text of a file in a checkout's history, "" if it is missing.

    ``blob`` is the id of a blob, or ``COMMIT:PATH``. Nothing is fetched.
    """
    words = ("git", "-C", root, "cat-file", "blob", blob)
    return attempt(*words, env=os.environ | NO_FETCH).output


def call_git_alone(folder: Path, *arguments: str, input: bytes = b"") -> Completed:  # noqa: A002
    """Run git in a folder that is no repository, without the settings of the user or the system.

    A failure of git is in the result, and not raised. Raises HostError if git is not installed.
    """
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "LC_ALL": "C",
    }
    done = attempt(
        "git",
        *arguments,
        cwd=folder,
        env=environment,
        input=input,
        resources=_GIT_RESOURCES,
    )

    if not done.started:
        raise done.error(
            why="git reads and applies the diffs that --patch names",
            hint="install git, or leave --patch out",
        )
    return done


def _fetch_commit(url: str, commit: str, repository: Path) -> None:
    """Fetch one commit into a temporary bare repository, then rename that to ``repository``.

    Raises StorageError if git or the disk fails.
    """
    home = repository.parent
    hint = "free some space, or choose another cache with PATCHKIT_CACHE_DIR"
    with translated(at=repository, hint=hint):
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch.", dir=home) as scratch:
            fresh = Path(scratch) / "repository"
            # With an empty template, since the user's template may have hooks.
            _call_git(fresh, "init", "--quiet", "--bare", "--template=", check=True)
            (fresh / "info").mkdir(exist_ok=True)
            (fresh / "info/attributes").write_text(_ATTRIBUTES, encoding="utf-8")

            done = _call_git(
                fresh, "fetch", "--quiet", "--depth=1", "--no-tags", url, commit
            )
            if done.status:
                raise StorageError(
                    f"git cannot fetch the commit {commit} from {url}: {done.trouble}",
                    why="there is no network, a proxy or certificate is missing, or the "
                    "repository has no such commit, or does not serve single ones",
                    hint="check the URL, or clone the repository yourself and name the folder",
                )

            try:
                fresh.rename(repository)
            except OSError:
                # Not an error if another process has fetched the commit meanwhile.
                if not (repository / "HEAD").is_file():
                    raise


def _call_git(repository: Path, *arguments: str, check: bool = False) -> Completed:
    """Run git on a bare repository, with the user's settings for proxies and credentials.

    Raises StorageError if git does not end in time, or fails and ``check`` is set; without
    ``check``, a failure is in the result. Raises HostError if git is not installed.
    """
    # The other GIT_ variables are left out, since they could name another repository.
    connecting = ("GIT_SSH", "GIT_SSL", "GIT_CONFIG")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(connecting)
    }

    # git must not ask for a password.
    environment |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    words = ("git", f"--git-dir={repository}", *arguments)
    done = attempt(*words, env=environment, timeout=_TIMEOUT_S)

    if not done.started:
        raise done.error(hint="install git, or use an archive")
    if done.status is None:  # the command is not shown: a URL may hold a password
        raise StorageError(
            f"git {arguments[0]}: {done.trouble}", hint="check the network"
        )
    if check and done.status:
        raise StorageError(f"git {arguments[0]} failed: {done.trouble}")
    return done
