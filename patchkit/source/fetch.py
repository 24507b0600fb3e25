"""Fetch releases from the user's package index and check them against a lock.

Digests and sizes come from the lock alone, and nothing that the index says about a file is trusted.
The exception is ``lock_files``, which adds a release to a lock.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import platformdirs
from packaging.utils import canonicalize_version
from packaging.version import Version

from patchkit.digests import sha256_of
from patchkit.durable.atomic import continuing, replacing
from patchkit.durable.staging import make_folders
from patchkit.errors import (
    HashMismatchError,
    PatchkitError,
    SourceError,
    StorageError,
    translated,
)
from patchkit.frozen import Values
from patchkit.process import attempt
from patchkit.records import read_toml, record
from patchkit.source.archive import Progress as Progress
from patchkit.source.project import project_named
from patchkit.source.releases import (
    LockEntry,
    load_facts,
    wheel_cpus,
)
from patchkit.units import BYTES_PER_GIB

if TYPE_CHECKING:
    # At run time, functions import these: importing requests takes long.
    import requests
    from pypi_simple import PyPISimple

CHUNK = 1 << 18  # bytes per read and write
_CACHE_HINT = "check the folder, or choose another cache with PATCHKIT_CACHE_DIR"
TIMEOUT = (20.0, 60.0)  # seconds to connect, seconds without a byte
# HTTP statuses: 206 Partial Content, 416 Range Not Satisfiable.
_PARTIAL = 206
_UNSATISFIABLE = 416
_LARGEST = BYTES_PER_GIB  # bytes of a file of unknown size
_PORTS = {"http": 80, "https": 443}
# Wheels for every Python 3 from some release on, of glibc or of Python alone.
_FOR_ANY_PYTHON = r"-(?:(?:py2\.)?py3-none|cp3\d+-abi3)-(?!musl).*\.whl$"
_Server = tuple[str, str | None, int | None]  # scheme, host, port


def cache_dir() -> Path:
    """Return the folder for downloads: ``$PATCHKIT_CACHE_DIR``, else the user's cache directory."""
    chosen = os.environ.get("PATCHKIT_CACHE_DIR")
    return Path(chosen) if chosen else platformdirs.user_cache_path("patchkit")


def _known_hint(project: str, version: str, lock: Mapping[str, LockEntry]) -> str:
    """Return a hint for an unknown version: releases of its series (0.33.0 for 0.33), or all."""
    releases = sorted(lock, key=Version)
    if recipe := project_named(project):
        refusal = load_facts(recipe).refusal
        releases = [v for v in releases if not refusal(Version(v))]

    series = ".".join(version.split(".")[:2])
    close = [f"{project}=={v}" for v in releases if v.startswith(f"{series}.")]
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known are {releases[0]} to {releases[-1]}" if releases else ""


def fetch(
    project: str,
    version: str,
    lock: Mapping[str, LockEntry],
    *,
    offline: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Return the path of an sdist in the cache. It is downloaded if needed, and always verified.

    The index is the one that pip is configured with. Several fetches may run at once.

    Raises SourceError if the lock does not have the version, or if the file is not in the cache and
    ``offline`` is set; HashMismatchError if the file has another sha256 than the lock;
    StorageError if network, index or disk fail.
    """
    if (entry := lock.get(version)) is None:
        raise SourceError(
            f"{project} {version} is not among the releases that this patchkit knows",
            why="it is mistyped, or newer or older than what patchkit covers",
            hint=_known_hint(project, version, lock),
        )

    path = cache_dir() / "sdists" / entry.filename
    with translated(at=path, hint=_CACHE_HINT):
        cached = sha256_of(path) if path.exists() else None
    if cached == entry.sha256:
        return path

    if offline:
        if cached is not None:
            raise _mismatch_error(str(path), entry, cached)
        raise SourceError(
            f"{entry.filename} is not in the cache, and offline it cannot be downloaded",
            why=f"it was never fetched into {path.parent}",
            hint=f"run once without --offline, or copy the file to {path}",
        )

    _download(path, project, entry, progress)
    return path


def _download(
    path: Path, project: str, entry: LockEntry, progress: Progress | None
) -> None:
    """Download a file from the index to ``path``, and verify it by ``entry``.

    A size of 0 in ``entry`` means that the size is unknown. Raises HashMismatchError, StorageError.
    """
    with translated(at=path, hint=_CACHE_HINT):
        make_folders(path.parent)
        ask = partial(_offered, project, entry.filename)
        # Replace a damaged file, but do not remove it first, since another fetch may just have
        # replaced it.
        with continuing(path) as stream:
            digest, size = transfer(stream, ask, entry.sha256, entry.size, progress)
            if digest != entry.sha256 or (entry.size and size != entry.size):
                stream.truncate(0)
                where = f"the download of {entry.filename}"
                raise _mismatch_error(where, entry, digest)


def lock_files(
    distribution: str,
    version: Version,
    folder: Path,
    progress: Progress | None,
) -> Path:
    """Name the files of a release in the locks of ``folder``; return the path of one in the cache.

    These are its sdist, and for each CPU a wheel for every Python. The digests are those that the
    index tells. Raises StorageError if the index has no such file or tells no digest,
    HashMismatchError if the download has another digest.
    """
    sdists: list[LockEntry] = []
    wheels: dict[str, LockEntry] = {}
    with index_client() as client:
        packages = client.get_project_page(distribution, timeout=TIMEOUT).packages
        for package in sorted(packages, key=attrgetter("filename")):
            named = canonicalize_version(package.version or "")
            sha256 = package.digests.get("sha256")
            if named != canonicalize_version(version) or sha256 is None:
                continue

            fields = {
                "version": str(version),
                "filename": package.filename,
                "sha256": sha256,
                "size": package.size or 0,
            }
            entry = record(LockEntry, fields)
            if package.package_type == "sdist":
                sdists.append(entry)
            elif re.search(_FOR_ANY_PYTHON, package.filename):
                wheels |= dict.fromkeys(wheel_cpus(package.filename), entry) | wheels

    del sdists[1:]
    files = [*sdists, *wheels.values()]
    if not files:
        what = f"an sdist of {distribution} {version}, or a wheel for every Python"
        raise not_offered(client.endpoint, f"{what}, with a sha256")

    release = str(version)
    path = fetch(distribution, release, {release: files[0]}, progress=progress)
    _add_to_lock(folder / "lock.toml", "sdist", sdists)
    _add_to_lock(folder / "wheels.toml", "wheel", dict.fromkeys(wheels.values()))
    return path


def _add_to_lock(lock: Path, kind: str, entries: Iterable[LockEntry]) -> None:
    """Add entries to a lock, unless it names their release already."""
    former: tuple[LockEntry, ...] = ()
    if lock.is_file():
        former = read_toml(tuple[LockEntry, ...], lock, SourceError, key=kind)

    known = {entry.version for entry in former}
    added = [entry for entry in entries if entry.version not in known]
    if added:
        rows = [entry.row(kind) for entry in (*former, *added)]
        with translated(at=lock), replacing(lock) as file:
            file.write("\n".join(rows).encode())


def _mismatch_error(where: str, entry: LockEntry, actual: str) -> PatchkitError:
    return HashMismatchError(
        f"{where} has the sha256 {actual}, but the lock says {entry.sha256}",
        why="the file is damaged or cut short, or it is not the one that was released",
        hint="fetch it again with the network, if need be from another index (PIP_INDEX_URL)",
    )


def transfer(
    stream: IO[bytes],
    ask: Callable[[int], AbstractContextManager[requests.Response]],
    sha256: str,
    size: int = 0,
    progress: Progress | None = None,
) -> tuple[str, int]:
    """Continue an interrupted download in ``stream``; return the sha256 and the size in bytes.

    ``ask(start)`` opens the response, from byte ``start`` on if the server can do that. The part
    that is in ``stream`` may be damaged or from another file: if the result does not have
    ``sha256``, the whole file is downloaded again. ``size`` is the expected size in bytes, 0 if
    unknown. If the digest is still wrong, it is returned, and ``stream`` is empty.
    """
    length = stream.seek(0, os.SEEK_END)
    starts = [0]
    if length and (not size or length < size):
        starts.insert(0, length)

    for start in starts:
        with ask(start) as response:
            begin = start if response.status_code == _PARTIAL else 0
            digest, done = _receive(stream, response, begin, size, progress)
        if digest == sha256:
            return digest, done

    stream.truncate(0)
    return digest, done


def _receive(
    stream: IO[bytes],
    response: requests.Response,
    begin: int,
    size: int,
    progress: Progress | None,
) -> tuple[str, int]:
    """Append a response to the first ``begin`` bytes of a stream; return its sha256 and size.

    Reading stops behind the expected size: the result then has a wrong digest.
    """
    stream.seek(0)
    stream.truncate(begin)
    digest = hashlib.sha256()
    for chunk in iter(partial(stream.read, CHUNK), b""):
        digest.update(chunk)

    announced = begin + int(response.headers.get("Content-Length", 0))
    limit = size or announced or _LARGEST
    done = begin
    for chunk in response.iter_content(CHUNK):
        stream.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        if progress is not None:
            progress(min(done, limit), limit)
        # A server that never stops must not fill the disk.
        if done > limit:
            break
    return digest.hexdigest(), done


@contextmanager
def opened(
    url: str, session: requests.Session, start: int = 0
) -> Iterator[requests.Response]:
    """Open a file on the network, from byte ``start`` on if the server can do that.

    A server that has nothing from ``start`` on is no failure: the digest of the result tells it.
    Raises StorageError if the connection fails, also while the block reads the file.
    """
    # Without this header, a server may compress the file, or decompress a .gz file.
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with (
        _explain_failures(url),
        session.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response,
    ):
        if response.status_code != _UNSATISFIABLE:
            response.raise_for_status()
        yield response


@contextmanager
def _offered(project: str, filename: str, start: int) -> Iterator[requests.Response]:
    """Open a project's file at the index, from byte ``start`` on if the server can do that.

    Raises StorageError if the index does not have the file.
    """
    with index_client() as client:
        packages = client.get_project_page(project, timeout=TIMEOUT).packages
        urls = {package.filename: package.url for package in packages}
        if filename not in urls:
            raise not_offered(client.endpoint, filename)
        with opened(urls[filename], client.s, start) as response:
            yield response


@contextmanager
def index_client() -> Iterator[PyPISimple]:
    """Open a client for the package index. Failures in the block are raised as StorageError."""
    import pypi_simple

    settings = pip_settings()
    url = settings.get("index-url", pypi_simple.PYPI_SIMPLE_ENDPOINT)
    with _explain_failures(url):
        session = index_session(settings)
        with pypi_simple.PyPISimple(url, session=session) as client:
            yield client


@contextmanager
def _explain_failures(url: str) -> Iterator[None]:
    """Raise network failures in the block as StorageError.

    The text of the failure is left out, since it may contain a password.
    """
    import pypi_simple
    import requests

    hint = "try again; check PIP_INDEX_URL, HTTPS_PROXY and REQUESTS_CA_BUNDLE"
    try:
        yield
    except requests.HTTPError as error:
        status = getattr(error.response, "status_code", None)
        why = "it denies access" if status in {401, 403, 407} else ""
        what = f"{_host_of(url)} answered with the HTTP status {status}"
        raise StorageError(what, why=why, hint=hint) from None
    except requests.RequestException as error:
        raise StorageError(
            f"the connection to {_host_of(url)} failed ({type(error).__name__})",
            why="there is no network, a proxy or certificate is missing, or the transfer was cut",
            hint=hint,
        ) from None
    except pypi_simple.NoSuchProjectError as error:
        raise not_offered(url, f"the project {error.project}") from None
    except (ValueError, pypi_simple.UnsupportedRepoVersionError) as error:
        raise StorageError(
            f"{_host_of(url)} does not answer as a package index ({type(error).__name__})",
            why="the URL is not that of a simple index, or a login page is in between",
            hint=hint,
        ) from None


def not_offered(url: str, name: str) -> PatchkitError:
    """Return the error for a file or project that an index lacks."""
    return StorageError(
        f"the package index at {_host_of(url)} does not offer {name}",
        why="it is a mirror that lacks it",
        hint="set PIP_INDEX_URL to an index that has it",
    )


def _host_of(url: str) -> str:
    """Return the host and port of a URL, without user, password and path.

    This also works for a malformed URL, for which urlsplit raises ValueError.
    """
    location = url.rpartition("@")[2].rpartition("://")[2]
    return re.split(r"[/?#]", location, maxsplit=1)[0]


def pip_settings() -> Values:
    """Return pip's settings, such as ``index-url``, by name; {} if pip is not installed.

    Environment variables (``PIP_INDEX_URL``) override pip's configuration files. As in pip, an
    empty setting counts as not set, and white space separates several values.
    """
    settings: dict[str, str] = {}
    for line in _pip_config("list").splitlines():
        name, _, value = line.partition("=")
        if not name.startswith("global."):
            continue
        option = name.removeprefix("global.")
        # pip prints the repr of each value.
        text = str(ast.literal_eval(value))
        if settings.setdefault(option, text) != text:
            # Newer versions of pip list the values of all configuration files, but not in the order
            # of precedence. `pip config get` returns the one that counts.
            settings[option] = _pip_config("get", name).strip()

    for name, value in os.environ.items():
        if name.startswith("PIP_") and value:
            option = name.removeprefix("PIP_").lower().replace("_", "-")
            settings[option] = value
    return {option: value for option, value in settings.items() if value}


def index_session(settings: Values) -> requests.Session:
    """Return a session with pip's proxy and certificates, and the logins of its indexes."""
    import requests

    session = requests.Session()
    session.verify = settings.get("cert", True)
    session.cert = settings.get("client-cert")
    if proxy := settings.get("proxy"):
        session.proxies = {"http": proxy, "https": proxy}
    logins = _index_logins(settings)

    def authenticate(request: requests.PreparedRequest) -> requests.PreparedRequest:
        login = logins.get(_server_of(request.url or ""))
        return requests.auth.HTTPBasicAuth(*login)(request) if login else request

    if logins:  # without `auth`, requests takes logins from ~/.netrc
        session.auth = authenticate
    return session


def _index_logins(settings: Values) -> dict[_Server, tuple[str, str]]:
    """Return server → (user, password), from the URLs of the indexes."""
    logins = {}
    # index-url comes last, so that its login wins over another one for the same server.
    for option in ("extra-index-url", "index-url"):
        for url in settings.get(option, "").split():
            with suppress(ValueError):  # a malformed URL is reported when it is used
                parts = urlsplit(url)
                if parts.username is not None:
                    password = unquote(parts.password or "")
                    logins[_server_of(url)] = (unquote(parts.username), password)
    return logins


def _server_of(url: str) -> _Server:
    """Return scheme, host and port of a URL; a login is only used for exactly these.

    Raises ValueError if the URL is malformed.
    """
    parts = urlsplit(url)
    port = parts.port or _PORTS.get(parts.scheme)
    return parts.scheme, parts.hostname, port


def _pip_config(*arguments: str) -> str:
    done = attempt(sys.executable, "-m", "pip", "config", *arguments)
    return "" if done.trouble else done.output
