"""Entries of locks as the package index describes its files, and the text of a lock."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version
from pypi_simple import DistributionPackage, PyPISimple

from patchkit.source.fetch import TIMEOUT, index_client, not_offered
from patchkit.source.releases import LockEntry, wheel_cpus

_LOCK_HEADER = """\
# The {what} that patchkit knows, with their sizes in bytes.
#
# Do not edit by hand: `nox -s add-release` asks the package index.
"""
_LOCKS = {"sdist": "source distributions", "wheel": "wheels"}


def lock_entries(project: str, versions: Iterable[str]) -> list[LockEntry]:
    """Return lock entries for the sdists of these releases, as the index describes them.

    The digests are the index's word. Raises StorageError if the
    index fails or lacks an sdist or its sha256.
    """
    with index_client() as client:
        packages = client.get_project_page(project, timeout=TIMEOUT).packages
        sdists = {
            each.version: each for each in packages if each.package_type == "sdist"
        }
        return [
            _described(client, version, sdists.get(version)) for version in versions
        ]


def described(project: str) -> list[tuple[str, str]]:
    """Return the name and the sha256 of every file of a project, as the index describes them.

    Raises StorageError if the index fails.
    """
    with index_client() as client:
        packages = client.get_project_page(project, timeout=TIMEOUT).packages
        pairs = [(each.filename, each.digests.get("sha256", "")) for each in packages]
        return [pair for pair in pairs if pair[1]]


def wheel_entries(
    project: str, versions: Iterable[str], cpus: Iterable[str] = ("aarch64", "x86_64")
) -> list[LockEntry]:
    """Return lock entries for wheels, one for each CPU: of several, the one that pip would take.

    That is the one with the highest build number in its name. "any" asks for one that is for every
    CPU. Raises as ``lock_entries`` does.
    """
    with index_client() as client:
        packages = client.get_project_page(project, timeout=TIMEOUT).packages
        wheels = [each for each in packages if each.package_type == "wheel"]
        return [
            _described(
                client,
                version,
                max(
                    (
                        each
                        for each in wheels
                        if each.version == version and _is_for(each, cpu)
                    ),
                    key=lambda each: parse_wheel_filename(each.filename)[2],
                    default=None,
                ),
                f"a wheel for {cpu}",
            )
            for version in versions
            for cpu in cpus
        ]


def _is_for(wheel: DistributionPackage, cpu: str) -> bool:
    try:
        return cpu in (wheel_cpus(wheel.filename) or ["any"])
    except InvalidWheelFilename:
        return False


def _described(
    client: PyPISimple,
    version: str,
    file: DistributionPackage | None,
    kind: str = "an sdist",
) -> LockEntry:
    if file is None or "sha256" not in file.digests:
        raise not_offered(client.endpoint, f"{kind} of {version} with a sha256")
    size = file.size
    if size is None:
        headers = {"Accept-Encoding": "identity"}
        response = client.s.head(
            file.url, allow_redirects=True, timeout=TIMEOUT, headers=headers
        )
        response.raise_for_status()
        # Without a length int() raises ValueError, which index_client turns into its error.
        size = int(response.headers.get("Content-Length", ""))
    return LockEntry(
        version=version,
        filename=file.filename,
        sha256=file.digests["sha256"],
        size=size,
    )


def render_lock(entries: Iterable[LockEntry], kind: str = "sdist") -> str:
    """Return the text of a lock of one kind of file, in the order of the versions."""
    ordered = sorted(entries, key=lambda entry: Version(entry.version))
    lines = [_LOCK_HEADER.format(what=_LOCKS[kind])]
    for entry in ordered:
        fields = asdict(entry).items()
        # Of text and whole numbers JSON's form is TOML's.
        lines += [
            f"[[{kind}]]",
            *(f"{key} = {json.dumps(value)}" for key, value in fields),
            "",
        ]
    return "\n".join(lines)
