"""A finished wheel, written so that equal contents are equal bytes."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import stat
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from patchkit import __version__
from patchkit.errors import ProofError

EPOCH = 315532800
"""SOURCE_DATE_EPOCH of every build: 1980-01-01, the earliest time that a zip can hold."""

_DATE = (1980, 1, 1, 0, 0, 0)
_REPLACED = re.compile(rb"^(Tag|Generator):.*(\n|\Z)", re.MULTILINE)


def seal(raw: Path, folder: Path, platform: str, added: Mapping[str, str] | None = None) -> Path:
    """Write ``raw`` anew into ``folder`` with one platform tag; the new wheel's path.

    ``added`` are texts that go into its .dist-info, by their path there; METADATA names those in
    ``licenses/``.

    Members are sorted, with .dist-info last as the specification recommends, and bear one date.
    They are stored, not deflated: a deflated byte depends on the version of zlib, and most of
    the library is compressed already.
    """
    with zipfile.ZipFile(raw) as bundle:
        infos = {info.filename: info for info in bundle.infolist() if not info.is_dir()}
        contents = {name: bundle.read(name) for name in infos}
    name, version, *_, interpreter, abi, _old = raw.stem.split("-")
    home = f"{name}-{version}.dist-info"
    if f"{home}/WHEEL" not in contents:
        raise ProofError(f"{raw.name} holds no {home}/WHEEL", why="the build did not finish")
    tag = f"{interpreter}-{abi}-{platform}"
    contents[f"{home}/WHEEL"] = tagged(contents[f"{home}/WHEEL"], tag)
    contents.pop(f"{home}/RECORD", None)
    contents |= {f"{home}/{path}": text.encode() for path, text in (added or {}).items()}
    licenses = [p.removeprefix("licenses/") for p in added or () if p.startswith("licenses/")]
    if licenses:
        contents[f"{home}/METADATA"] = _licensed(contents[f"{home}/METADATA"], sorted(licenses))
    ordered = dict(sorted(contents.items(), key=lambda item: (item[0].startswith(home), item[0])))
    ordered[f"{home}/RECORD"] = record(ordered, f"{home}/RECORD")
    sealed = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(sealed, "w", zipfile.ZIP_STORED) as bundle:
        for path, data in ordered.items():
            bundle.writestr(_member(path, infos.get(path)), data)
    return sealed


def record(contents: Mapping[str, bytes], own: str) -> bytes:
    """RECORD for these members; ``own`` is its path, which bears no digest."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for path, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
        writer.writerow((path, f"sha256={digest.decode()}", len(data)))
    writer.writerow((own, "", ""))
    return text.getvalue().encode()


def tagged(wheel: bytes, tag: str) -> bytes:
    """The text of a WHEEL file with this one tag, and patchkit as its generator."""
    rest = _REPLACED.sub(b"", wheel).rstrip(b"\n")
    return rest + f"\nGenerator: patchkit {__version__}\nTag: {tag}\n".encode()


def _licensed(metadata: bytes, names: Sequence[str]) -> bytes:
    """The text of a METADATA file that names more licence files (PEP 639)."""
    head, gap, body = metadata.rstrip(b"\n").partition(b"\n\n")
    lines = [head, *(f"License-File: {name}".encode() for name in names)]
    return b"\n".join(lines) + gap + body + b"\n"


def _member(path: str, info: zipfile.ZipInfo | None) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(path, _DATE)
    program = info is not None and (info.external_attr >> 16) & stat.S_IXUSR
    member.external_attr = (stat.S_IFREG | (0o755 if program else 0o644)) << 16
    member.create_system = 3  # Unix, wherever it is written
    return member
