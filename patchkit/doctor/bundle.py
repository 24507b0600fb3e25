"""Pack what a bug report needs into one file, without what names people, machines and secrets."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.doctor.redaction import PrivateNames, Redactor
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


def private_names(nodes: Iterable[tuple[str, NodeFacts | None]]) -> PrivateNames:
    """Return what nodes say of themselves, for ``pack_report``.

    ``nodes`` are the destinations of cluster.toml, as ssh takes them, with the facts if they are
    known.
    """
    hosts, users, addresses, serials = [], [], [], []
    for destination, facts in nodes:
        user, _, host = destination.rpartition("@")
        own = [host]
        users.append(user)
        if facts is not None:
            own.append(facts.host.system.hostname)
            users += [facts.user, Path(facts.home).name]
            addresses += [its.address for dev in facts.host.netdevs for its in dev.addresses]
            addresses += [gid.address for rdma in facts.host.rdma for gid in rdma.gids]
            serials += [dev.mac for dev in facts.host.netdevs if dev.mac]
        # The first part of a host's name is its name as well; an address has none.
        short = [name.partition(".")[0] for name in own if "." in name]
        own += [name for name in short if not name.isdigit() and len(name) > 2]
        hosts.append(_unique(own))
    return PrivateNames(
        hosts=tuple(hosts),
        users=_unique(users),
        addresses=_unique(addresses),
        serials=_unique(serials),
    )


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, names)))


def pack_report(parts: Mapping[str, Any], names: PrivateNames) -> Report:
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
        # A name within the folder that no other part has.
        words = [word for word in redactor.text(name).split("/") if word not in ("", ".", "..")]
        place, number = "/".join(words) or "unnamed", 2
        while place in files or place == _TAKEN_OUT:
            place, number = f"{'/'.join(words)}.{number}", number + 1
        files[place] = clean.encode("utf-8", "replace")
    placeholders = dict(sorted(redactor.taken.items()))
    kinds: dict[str, int] = {}
    for placeholder, count in placeholders.items():
        kind = placeholder.partition("-")[0]
        kinds[kind] = kinds.get(kind, 0) + count
    taken = {"kinds": kinds, "placeholders": placeholders}
    files[_TAKEN_OUT] = _to_json({"note": _NOTE, **taken}).encode()
    return Report(data=_pack_archive(files), files=tuple(sorted(files)), **taken)


def save_report(report: Report, path: Path) -> None:
    """Write a report for its owner alone. Raises UsageError if the file is there, StorageError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with translated("no report was written", at=path):
        try:
            handle = os.open(path, flags, 0o600)
        except FileExistsError:
            raise UsageError(f"{path}: is there already", hint="name a new file") from None
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
