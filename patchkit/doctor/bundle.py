"""Pack what a bug report needs into one file, without what names people, machines and secrets."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.doctor.redaction import PrivateNames, Redactor
from patchkit.durable.atomic import replacing
from patchkit.durable.failure import translated
from patchkit.errors import UsageError

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
            serials += [dev.mac for dev in facts.host.netdevs]
        # The first part of a host's name is its name as well; an address has none.
        short = [name.partition(".")[0] for name in own if "." in name]
        own += [name for name in short if not name.isdigit() and len(name) > 2]
        hosts.append(tuple(own))
    return PrivateNames(
        hosts=tuple(hosts),
        users=tuple(users),
        addresses=tuple(addresses),
        serials=tuple(serials),
    )


def pack_report(parts: Mapping[str, Any], names: PrivateNames) -> Report:
    """Return a .tar.gz of parts by file name: texts, and values that JSON takes.

    The same parts make the same bytes.
    """
    redactor = Redactor(names)
    for name, part in parts.items():
        redactor.learn(name)
        redactor.learn(part)
    files: dict[str, str] = {}
    for name, part in sorted(parts.items()):
        clean = redactor.text(part) if isinstance(part, str) else _to_json(redactor.value(part))
        words = [word for word in redactor.text(name).split("/") if word not in ("", ".", "..")]
        files["/".join(words)] = clean
    placeholders = dict(sorted(redactor.taken.items()))
    kinds: Counter[str] = Counter()
    for placeholder, count in placeholders.items():
        kinds[placeholder.partition("-")[0]] += count
    taken = {"kinds": kinds, "placeholders": placeholders}
    files["taken-out.json"] = _to_json({"note": _NOTE, **taken})
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, text in sorted(files.items()):
            data = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"patchkit-report/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, 0
            archive.addfile(entry, io.BytesIO(data))
    return Report(data=buffer.getvalue(), files=tuple(sorted(files)), **taken)


def save_report(report: Report, path: Path) -> None:
    """Write a report for its owner alone. Raises UsageError if the file is there, StorageError."""
    if os.path.lexists(path):
        raise UsageError(f"{path}: is there already", hint="name a new file")
    with translated("no report was written", at=path), replacing(path, private=True) as file:
        file.write(report.data)


def _to_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
