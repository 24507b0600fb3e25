"""Make the one archive of a machine that is handed on: a report of `doctor --save`, or a proof.

It holds what was found as JSON, a summary, logs, and a manifest. Names and secrets are taken out
of all of it together, so that a placeholder means the same in each file.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchkit.doctor.private_names import PrivateNames
from patchkit.doctor.redaction import Redactor
from patchkit.durable.atomic import replacing
from patchkit.errors import UsageError, translated

MANIFEST = "manifest.json"
SUMMARY = "summary.txt"
MEMBERS = rf"(?:proof|report)\.json|{MANIFEST}|{SUMMARY}|logs/[a-z0-9.-]{{1,60}}\.txt"
_NOTE = (
    "Placeholders stand for what names people, machines and secrets; the same one is the same "
    "thing everywhere. A name or a key in a form that patchkit does not know may be left: look."
)
Summary = Callable[[Mapping[str, Any]], Sequence[str]]


class FieldMap(dict[str, Any]):
    """A record as JSON has it: its keys are names of fields, which are replaced by nothing.

    The keys of any other mapping are data, such as names of nodes and paths of files.
    """


def pack_archive(
    name: str,
    content: FieldMap,
    logs: Mapping[str, str],
    names: PrivateNames,
    summary: Summary,
    *,
    paths: bool = False,
) -> tuple[bytes, dict[str, int]]:
    """Return an archive, the same bytes for the same content, and how often what was replaced.

    ``content`` becomes NAME.json; ``summary`` makes lines of it after names were taken out.
    ``paths`` takes out folders, too.
    """
    redactor = Redactor(names, paths=paths)
    parts = [content, FieldMap(logs)]
    _walk(parts, redactor.learn)
    clean, clean_logs = _walk(parts, redactor.value)
    taken = dict(sorted(redactor.taken.items()))

    files = {f"logs/{log}.txt": text for log, text in clean_logs.items() if text}
    files[f"{name}.json"] = _as_json(clean)
    files[SUMMARY] = "".join(f"{line}\n" for line in summary(clean))
    digests = {
        file: hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        for file, text in sorted(files.items())
    }
    files[MANIFEST] = _as_json({"note": _NOTE, "taken_out": taken, "sha256": digests})
    return _pack(files), taken


def _as_json(content: object) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _pack(files: Mapping[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(files):
            data = files[name].encode("utf-8", "replace")
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return gzip.compress(packed.getvalue(), mtime=0)


def require_new(place: Path) -> None:
    """Raise UsageError unless an archive can be written there."""
    if os.path.lexists(place):
        raise UsageError(f"{place}: is there already", hint="name a new file")
    if not place.parent.is_dir():
        hint = "name a file in a folder that is there"
        raise UsageError(f"{place.parent}: no such folder", hint=hint)


def save_archive(packed: bytes, place: Path) -> None:
    """Write an archive for its owner alone. Raises StorageError, UsageError if it is there."""
    require_new(place)
    with (
        translated("no archive was written", at=place),
        replacing(place, private=True) as file,
    ):
        file.write(packed)


def _walk(value: Any, act: Callable[[Any, str], Any], key: str = "") -> Any:
    """Return a value of JSON with what ``act`` makes of each text, number and key that is data."""
    if isinstance(value, FieldMap):
        return {name: _walk(part, act, name) for name, part in value.items()}
    if isinstance(value, Mapping):
        pairs = ((str(name), part) for name, part in value.items())
        return {act(name, ""): _walk(part, act, name) for name, part in pairs}
    if isinstance(value, list | tuple):
        return [_walk(part, act, key) for part in value]
    return act(value, key) if value and not isinstance(value, bool) else value
