"""The upstream archive of a source package, through apt and the distribution that apt knows.

apt is run with lists, cache and sources of its own in a throw-away folder: no root, no change to
the system. The archive's address comes from the machine's own apt configuration.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import HostError, PatchkitError, SourceError, StorageError
from patchkit.process import Completed, run
from patchkit.source.fetch import cache_dir

_HELPER = "/usr/lib/apt/apt-helper"  # in no folder of PATH
_TIMEOUT_S = 600
# sources.list(5): the one-line style; `_deb822` reads the other one.
_ONE_LINE = re.compile(r"deb(-src)?\s+(\[(?P<options>[^]]*)\]\s*)?(?P<uri>\S+)\s+(?P<suite>\S+)\s")
_URI = re.compile(r"^'(?P<uri>[^']+)' (?P<file>\S+) (?P<size>\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A distribution's suites and components with the source package, and the key that signs.

    No suites: those that the machine is configured for.
    """

    suites: tuple[str, ...]
    components: tuple[str, ...]
    keyring: str


PACKAGE = "nvidia-nccl"
# Debian's orig tarball is, byte for byte, what upstream's archive URL delivers.
DISTRIBUTIONS = {
    "debian": Distribution(
        suites=("sid",),
        components=("contrib",),
        keyring="/usr/share/keyrings/debian-archive-keyring.gpg",
    ),
    "ubuntu": Distribution(
        suites=(),
        components=("multiverse",),
        keyring="/usr/share/keyrings/ubuntu-archive-keyring.gpg",
    ),
}


def keep_nccl() -> None:
    """Put NCCL 2.29.7 into patchkit's cache, from the distribution, if it is not there."""
    place = cache_dir() / "sources" / "nccl-2.29.7.tar.gz"
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(PatchkitError):
        found = upstream_archive(PACKAGE, "2.29.7", DISTRIBUTIONS, Path(folder))
        part = place.with_suffix(".part")
        shutil.copyfile(found, part)
        part.replace(place)


@dataclass(frozen=True, slots=True)
class Mirror:
    """A line of an apt configuration: an archive, and one of its suites."""

    uri: str
    suite: str


def upstream_archive(
    package: str,
    version: str,
    distributions: Mapping[str, Distribution],
    dest: Path,
    *,
    etc: Path = Path("/etc"),
) -> Path:
    """Put the archive that the package was made from into ``dest``, and return its path.

    ``version`` is upstream's; ``etc`` says what the system is, and which archives it uses. Which
    bytes arrived is for the caller to check. Raises HostError if there is no apt or no archive of a
    known distribution, SourceError if that lacks the version, StorageError if apt cannot get it.
    """
    system = _os_release(etc)
    name = system.get("ID", "").lower()
    if shutil.which("apt-get") is None or name not in distributions:
        raise HostError(
            f"no apt that would have {package}: this is {name or 'an unknown system'}",
            why=f"the source package is in {' and '.join(distributions)}",
        )
    with tempfile.TemporaryDirectory(prefix="patchkit-apt-") as scratch:
        archives = _archives(etc, system.get("VERSION_CODENAME", ""), distributions[name].suites)
        apt = _Apt(Path(scratch), package, distributions[name], archives)
        return apt.fetch(version, dest)


def mirrors(folder: Path) -> tuple[Mirror, ...]:
    """Return the archives of sources.list and sources.list.d, in order."""
    parts = folder / "sources.list.d"
    lists = [folder / "sources.list", *sorted(parts.glob("*.list"))]
    found = [mirror for path in lists for mirror in _from_lines(_text(path))]
    found += [mirror for path in sorted(parts.glob("*.sources")) for mirror in _deb822(_text(path))]
    return tuple(dict.fromkeys(found))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _from_lines(text: str) -> Iterator[Mirror]:
    for line in text.splitlines():
        if match := _ONE_LINE.match(line.strip() + " "):
            yield Mirror(match["uri"], match["suite"])


def _deb822(text: str) -> Iterator[Mirror]:
    for fields in stanzas(text):
        if fields.get("enabled", "yes").lower() not in ("no", "false", "0"):
            for uri in fields.get("uris", "").split():
                for suite in fields.get("suites", "").split():
                    yield Mirror(uri, suite)


def stanzas(text: str) -> list[dict[str, str]]:
    """Return the paragraphs of a control file: field name in lower case → value, lines joined."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines).strip())
    return [dict(_fields(paragraph)) for paragraph in paragraphs if paragraph.strip()]


def _fields(paragraph: str) -> Iterator[tuple[str, str]]:
    for field in re.split(r"\n(?=\S)", paragraph):
        name, _, value = field.partition(":")
        yield name.strip().lower(), value.strip()


def _os_release(etc: Path) -> dict[str, str]:
    pairs = [line.partition("=") for line in _text(etc / "os-release").splitlines()]
    return {key: value.strip().strip("\"'") for key, _, value in pairs}


def _archives(etc: Path, codename: str, suites: tuple[str, ...]) -> tuple[Mirror, ...]:
    """Return the archives of the system's own release, with those suites, or with its own."""
    plain = [
        mirror
        for mirror in mirrors(etc / "apt")
        if codename and mirror.suite in (codename, f"{codename}-updates")
    ]
    if not plain:
        raise HostError(
            f"apt is configured for no archive of {codename or 'this system'}",
            why=f"{etc / 'apt'} holds no line for it: a container without sources, for example",
        )
    if not suites:
        return tuple(plain)
    return tuple(dict.fromkeys(Mirror(each.uri, suite) for each in plain for suite in suites))


@dataclass(frozen=True, slots=True)
class _Apt:
    """apt on one folder of its own."""

    home: Path
    package: str
    place: Distribution
    archives: tuple[Mirror, ...]

    def fetch(self, version: str, dest: Path) -> Path:
        self._configure()
        # A mirror that lacks other lists is no reason to stop: what counts is asked for next.
        updated = self._call("apt-get", "-qq", "update")
        shown = self._call("apt-cache", "showsrc", "--only-source", self.package).output
        exact = [
            fields["version"]
            for fields in stanzas(shown)
            # deb-version(7): Debian's revision is behind the last -, NCCL's own before: 2.29.7-1.
            if fields.get("version", "").rpartition("-")[0].partition("-")[0] == version
        ]
        if not exact:
            raise self._absent(version, shown, updated.errors)
        return self._download(max(exact, key=len), dest)

    def _configure(self) -> None:
        lines = [
            f"deb-src [signed-by={self.place.keyring}] {archive.uri} {archive.suite} "
            f"{' '.join(self.place.components)}\n"
            for archive in self.archives
        ]
        (self.home / "sources.list").write_text("".join(lines), encoding="utf-8")
        for folder in ("parts", "state/lists/partial", "cache/archives/partial"):
            (self.home / folder).mkdir(parents=True)
        (self.home / "status").touch()

    def _download(self, exact: str, dest: Path) -> Path:
        named = self._call(
            "apt-get", "source", "--download-only", "--print-uris", f"{self.package}={exact}"
        )
        for match in _URI.finditer(named.output):
            if re.search(r"\.orig\.tar\.\w+$", match["file"]):
                path = dest / match["file"]
                # Only this file: the packaging of it is of no use here, and mirrors may lack it.
                done = self._call(_HELPER, "download-file", match["uri"], str(path))
                if done.status == 0 and path.is_file():
                    return path
                raise StorageError(
                    f"apt cannot download {match['file']}: {_last(done.errors)}",
                    why="the network failed, or the mirror lacks the file",
                    hint="try again later",
                )
        raise SourceError(
            f"apt names no upstream archive of {self.package} {exact}: {_last(named.errors)}"
        )

    def _absent(self, version: str, shown: str, trouble: str) -> PatchkitError:
        """Return StorageError if apt got no lists, SourceError if they lack the version."""
        offered = sorted({fields.get("version", "") for fields in stanzas(shown)} - {""})
        return (StorageError if "ailed to " in trouble else SourceError)(
            f"apt offers no {self.package} {version}"
            + (f", only {', '.join(offered)}" if offered else ""),
            why=_last(trouble) if trouble.strip() else "the distribution does not carry it",
        )

    def _call(self, program: str, *arguments: str) -> Completed:
        options = {
            "Dir::Etc::sourcelist": self.home / "sources.list",
            "Dir::Etc::sourceparts": self.home / "parts",
            "Dir::State": self.home / "state",
            "Dir::State::status": self.home / "status",
            "Dir::Cache": self.home / "cache",
            "APT::Sandbox::User": "root",  # no other user: the folder is the caller's
            "Acquire::Languages": "none",
            "Acquire::Retries": "2",
            "Acquire::Retries::Delay": "false",
        }
        flags = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
        words = (program, *flags, *arguments)
        return run(*words, kind=StorageError, check=False, timeout=_TIMEOUT_S)


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "apt said nothing"
