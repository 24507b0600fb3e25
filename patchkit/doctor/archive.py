"""Make the archive that an owner of machines hands on: a report of `doctor --save`, or a proof.

The archive has findings as JSON, a summary, logs, and a manifest. One redactor takes names and
secrets out of all parts, so that a placeholder means the same in each file.
"""

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from patchkit.digests import digest
from patchkit.doctor.private_names import PrivateNames
from patchkit.doctor.redaction import Redactor
from patchkit.durable.atomic import replacing
from patchkit.errors import UsageError, translated
from patchkit.frozen import Fields, Values, frozen

_NOTE = (
    "Placeholders stand for what names people, machines and secrets; the same one is the same "
    "thing everywhere. A name or a key in a form that patchkit does not know may be left: look."
)


class FieldMap(Fields):
    """A record as a JSON object. Its keys are names of fields, which are never replaced.

    The keys of any other mapping are data, such as names of nodes and paths of files.
    """


@frozen
class CleanContent:
    """A record and logs without private names, and how often each placeholder occurs in them."""

    content: Mapping[str, Any]
    logs: Values
    counts: Mapping[str, int]


def take_out_names(
    content: FieldMap,
    logs: Values,
    names: PrivateNames,
    *,
    paths: bool = False,
) -> CleanContent:
    """Return content and logs with placeholders for private names.

    With ``paths`` private folders are replaced as well.
    """
    redactor = Redactor(names, paths=paths)
    parts = [content, FieldMap(logs)]

    _change_values(parts, redactor.learn)
    clean, clean_logs = _change_values(parts, redactor.value)

    counts = dict(sorted(redactor.counts.items()))
    return CleanContent(
        content=clean,
        logs=clean_logs,
        counts=counts,
    )


def pack_archive(
    name: str,
    clean: CleanContent,
    summary: Iterable[str],
) -> bytes:
    """Return the bytes of a .tar.gz with NAME.json, summary.txt, manifest.json and the logs.

    The same content and summary give the same bytes.
    """
    texts = {f"logs/{log}.txt": text for log, text in clean.logs.items() if text}
    texts[f"{name}.json"] = _as_json(clean.content)
    texts["summary.txt"] = "".join(f"{line}\n" for line in summary)
    files = {file: text.encode("utf-8", "replace") for file, text in texts.items()}

    manifest = {
        "note": _NOTE,
        "taken_out": clean.counts,
        "sha256": {file: digest(data) for file, data in files.items()},
    }
    files["manifest.json"] = _as_json(manifest).encode()

    packed = io.BytesIO()
    with tarfile.open(
        fileobj=packed,
        mode="w",
        format=tarfile.USTAR_FORMAT,
    ) as archive:
        for file, data in sorted(files.items()):
            member = tarfile.TarInfo(file)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))

    return gzip.compress(packed.getvalue(), mtime=0)


def _as_json(content: object) -> str:
    text = json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True)
    return f"{text}\n"


def require_new(place: Path) -> None:
    """Raise UsageError if the file exists, or if its folder does not."""
    if os.path.lexists(place):
        raise UsageError(f"{place}: is there already", hint="name a new file")
    if not place.parent.is_dir():
        hint = "name a file in a folder that is there"
        raise UsageError(f"{place.parent}: no such folder", hint=hint)


def save_archive(packed: bytes, place: Path) -> None:
    """Write an archive that only its owner can read.

    Raise UsageError if the file exists or its folder does not, StorageError if writing fails.
    """
    require_new(place)
    with (
        translated("no archive was written", at=place),
        replacing(place, private=True) as file,
    ):
        file.write(packed)


def _change_values(
    value: Any,
    change: Callable[[Any, str], Any],
    key: str = "",
) -> Any:
    """Return a value of JSON in which ``change`` replaced each text, number and key that is data.

    ``change`` gets the value and the key above it. Names of fields, booleans and empty values
    stay as they are.
    """
    if isinstance(value, Mapping):
        changed = {}
        for name, part in value.items():
            is_field = isinstance(value, FieldMap)
            new_name = name if is_field else change(str(name), "")
            changed[new_name] = _change_values(part, change, str(name))
        return changed

    if isinstance(value, list | tuple):
        return [_change_values(part, change, key) for part in value]

    if not value or isinstance(value, bool):
        return value

    return change(value, key)
