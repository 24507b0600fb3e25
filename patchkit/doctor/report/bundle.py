"""Pack what a bug report needs into one file, without what names people, machines and secrets."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.doctor.report.redaction import PrivateNames, Redactor
from patchkit.durable.atomic import sync
from patchkit.durable.failure import translated
from patchkit.errors import UsageError

_HOME = "patchkit-report"
_TAKEN_OUT = "taken-out.json"
_NOTE = (
    "Placeholders stand for what names people, machines and secrets; the same one is the same "
    "thing everywhere. A name or a key in a form that patchkit does not know may be left: look."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A packed report: its bytes, its files, and what was taken out, by kind and placeholder."""

    data: bytes
    files: tuple[str, ...]
    kinds: Mapping[str, int]
    placeholders: Mapping[str, int]


def private_names(
    nodes: Iterable[tuple[str, NodeFacts | None]], others: Iterable[str] = ()
) -> PrivateNames:
    """Return what nodes say of themselves, for ``pack``.

    ``nodes`` are the destinations of cluster.toml, as ssh takes them, with the facts if they are
    known; ``others`` further names of hosts.
    """
    hosts, users, addresses, serials = [], [], [], []
    for destination, facts in nodes:
        user, _, host = destination.rpartition("@")
        own = [host, *_short_names(host)]
        users.append(user)
        if facts is not None:
            own += [facts.host.system.hostname, *_short_names(facts.host.system.hostname)]
            users += [facts.user, Path(facts.home).name]
            addresses += [each.address for dev in facts.host.netdevs for each in dev.addresses]
            addresses += [gid.address for rdma in facts.host.rdma for gid in rdma.gids]
            serials += [dev.mac for dev in facts.host.netdevs if dev.mac]
        hosts.append(tuple(dict.fromkeys(filter(None, own))))
    hosts += [(each, *_short_names(each)) for each in others]
    return PrivateNames(
        hosts=tuple(hosts),
        users=tuple(dict.fromkeys(filter(None, users))),
        addresses=tuple(dict.fromkeys(filter(None, addresses))),
        serials=tuple(dict.fromkeys(filter(None, serials))),
    )


def _short_names(host: str) -> Iterator[str]:
    """Yield the first part of a host's name; an address has none."""
    first = host.partition(".")[0]
    if first != host and not first.isdigit() and len(first) > 2:
        yield first


def pack(parts: Mapping[str, Any], names: PrivateNames) -> Report:
    """Return a .tar.gz of parts by file name: texts, and values that JSON takes.

    The same parts make the same bytes.
    """
    redactor = Redactor(names)
    for name, part in parts.items():
        redactor.learn(name)
        redactor.learn(part)
    files: dict[str, bytes] = {}
    for name, part in sorted(parts.items()):
        clean = redactor.text(part) if isinstance(part, str) else _to_json(redactor.value(part))
        files[_free_name(redactor.text(name), files)] = clean.encode("utf-8", "replace")
    taken = redactor.report()
    files[_TAKEN_OUT] = _to_json({"note": _NOTE, **taken}).encode()
    return Report(data=_pack_archive(files), files=tuple(sorted(files)), **taken)


def save(report: Report, path: Path) -> None:
    """Write a report for its owner alone. Raises UsageError if the file is there, StorageError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o600)
    except FileExistsError:
        raise UsageError(f"{path}: is there already", hint="name a new file") from None
    except OSError:
        with translated(at=path):
            raise
    with translated("no report was written", at=path):
        try:
            with os.fdopen(handle, "wb") as file:
                os.fchmod(file.fileno(), 0o600)  # whatever umask adds or takes away
                file.write(report.data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        sync(path.parent)


def _to_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _free_name(name: str, taken: Mapping[str, bytes]) -> str:
    """Return a name of a file within the folder that no other part has."""
    parts = [each for each in name.split("/") if each not in ("", ".", "..")]
    wanted = "/".join(parts) or "unnamed"
    found, number = wanted, 2
    while found in taken or found == _TAKEN_OUT:
        found, number = f"{wanted}.{number}", number + 1
    return found


def _pack_archive(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(f"{_HOME}/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, 0
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
