"""Name a wheel that patchkit made: facts as JSON, a digest of the content in the version."""

import json
import re
from collections.abc import Mapping

from patchkit.digests import digest
from patchkit.elf import MAGIC
from patchkit.frozen import frozen
from patchkit.wheel.file.wheelfile import FACTS, Facts, WheelFile
from patchkit.wheel.file.write import set_tag, set_version

CUDA_LICENSE = "NVIDIA CUDA Toolkit EULA"
"""The name of a license for which SPDX has no identifier."""

UNLABELLED = "0" * 10
"""The place of the digest in a version, before the digest is known."""


_FORMAT = 4  # of a new wheel; goes up if the same request gives other bytes
# WHEEL repeats the build tag of the file name (PEP 427), which the new name has not.
_BUILD = re.compile(rb"^Build:.*\n", re.MULTILINE)


def as_text(value: object) -> str:
    """Return a value as JSON for a file of a wheel; keys are sorted, for reproducible bytes."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def digest_label(*texts: str) -> str:
    """Return a label for a local version: the first ten hex digits of the digest of all texts.

    If they are decimal digits only, the first is replaced by ``a``.
    """
    short = digest("\0".join(texts))[:10]
    # PEP 440 reads a segment of decimal digits as a number and drops leading zeros.
    return short if not short.isdigit() else f"a{short[1:]}"


@frozen
class NewWheel:
    """A wheel that is made of another one: its file name, its new members, and its facts."""

    filename: str
    members: Mapping[str, bytes]
    facts: Facts


def name_wheel(
    wheel: WheelFile,
    tag: str,
    facts: Facts,
    members: Mapping[str, bytes],
) -> NewWheel:
    """Name a wheel that is made of ``wheel`` by a digest of all its new members.

    ``facts["wheel"]`` is the version with UNLABELLED in the place of the digest; so do members that
    tell the version.
    """
    version = facts["wheel"]
    home = f"{wheel.distribution}-{version}.dist-info"
    metadata = wheel.read(f"{wheel.dist_info}/METADATA")
    build = wheel.read(f"{wheel.dist_info}/WHEEL")
    members = {
        **members,
        f"{home}/METADATA": set_version(metadata, version),
        f"{home}/WHEEL": set_tag(_BUILD.sub(b"", build), tag),
        f"{home}/{FACTS}": as_text(facts).encode(),
    }

    lines = [f"{_FORMAT}\n{wheel.sha256}\n{tag}\n"]
    lines += [f"{digest(data)}  {path}\n" for path, data in sorted(members.items())]
    label = version.partition("+")[2]
    final = label.replace(UNLABELLED, digest_label("".join(lines)))

    labelled = {}
    for path, data in members.items():
        # A library does not hold its version, and is large.
        if not data.startswith(MAGIC):
            data = data.replace(label.encode(), final.encode())
        labelled[path.replace(label, final)] = data

    version = version.replace(label, final)
    return NewWheel(
        filename=f"{wheel.distribution}-{version}-{tag}.whl",
        members=labelled,
        facts=facts | {"wheel": version},
    )
