"""Keep what a model answered, to see later how far its answers moved. Runs on the head."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patchkit.cluster.agent.installation import share_folder
from patchkit.cluster.ssh.answer import encoded
from patchkit.durable.atomic import replacing
from patchkit.errors import PatchkitError
from patchkit.foreign import clock_text
from patchkit.frozen import Values, frozen
from patchkit.reading import read_text
from patchkit.records import RecordError, read_json, record

_MOST = 16  # that are kept, of all models
_LARGEST = 2 << 20  # bytes of the file


@frozen
class Start:
    """What serves a model: its ``commit``, and release, environment or image, and flags of vLLM.

    Weights whose commit is unknown have the folder or name that the server loaded instead.
    ``cluster`` is the name of the cluster that `patchkit up` started, "" for another server.
    """

    cluster: str
    model: str
    commit: str
    parts: Values

    def part(self, name: str) -> str:
        """Return the part ``name``, "" if it is not known."""
        return self.parts.get(name, "")


@frozen
class Fingerprint:
    """The logarithms of chances that a model gave to the tokens of fixed texts, by text.

    ``time`` is in seconds since 1970. ``summary`` is the judgement in words, ``is_right`` whether
    nothing was wrong or left out.
    """

    start: Start
    time: float
    logprobs: Mapping[str, tuple[float, ...]]
    summary: str
    is_right: bool


def read_fingerprints(start: Start) -> tuple[Fingerprint, ...]:
    """Return the fingerprints of the same model and commit with right answers, the newest first."""
    wanted = (start.model, start.commit)
    return tuple(
        kept
        for kept in reversed(_read_all())
        if kept.is_right and (kept.start.model, kept.start.commit) == wanted
    )


def last_judgement(cluster: str, model: str) -> str:
    """Return how the answers of a cluster's model were judged last, with the time; "" for never."""
    for kept in reversed(_read_all()):
        if (kept.start.cluster, kept.start.model) == (cluster, model):
            return f"{clock_text(kept.time)} {kept.summary}"
    return ""


def keep_fingerprint(fingerprint: Any) -> None:
    """Keep a fingerprint, which has the fields of a ``Fingerprint``.

    It replaces that of the same start with the same judgement.
    """
    new = record(Fingerprint, fingerprint)
    others = [
        kept
        for kept in _read_all()
        if (kept.start, kept.is_right) != (new.start, new.is_right)
    ]

    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(path, private=True) as file:
        file.write(encoded([*others, new][-_MOST:]).encode())


def _path() -> Path:
    return share_folder("answers") / "fingerprints.json"


def _read_all() -> tuple[Fingerprint, ...]:
    """Return all fingerprints, the oldest first; a spoiled or strange file counts as none."""
    with contextlib.suppress(PatchkitError, RecordError, OSError, ValueError):
        text = read_text(_path(), limit=_LARGEST, follow=False)
        return read_json(tuple[Fingerprint, ...], text)
    return ()
