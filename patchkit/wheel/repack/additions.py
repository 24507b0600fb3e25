"""What is new in a repacked wheel: patched files, the ledger, its own version, facts and SBOM.

Everything here is text in, bytes out; the wheel itself is written by ``rewrite``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.version import Version

from patchkit import __version__
from patchkit.apply import Outcome, Workspace, request_fields
from patchkit.errors import DriftError
from patchkit.patching.fix import Request, State
from patchkit.patching.ledger import Ledger, ledger_path, original_path
from patchkit.patching.plan import Plan
from patchkit.source.detect import dist_info
from patchkit.wheel.file.facts import FACTS, as_text, label_of
from patchkit.wheel.file.sbom import Patch, patches, vllm_sbom
from patchkit.wheel.file.seal import tagged
from patchkit.wheel.repack.upstream import Origin

_FORMAT = 1  # of what rewrite writes; goes up if the same request gives other bytes
_OWN_VERSION = "vllm/_version.py"
_UNLABELLED = "0" * 10
_SBOM = "sboms/patchkit.cdx.json"
_BUILD = re.compile(rb"^Build:.*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edition:
    """A repacked wheel before it is written: its name, and every member that differs."""

    filename: str
    home: tuple[str, str]
    members: Mapping[str, bytes]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """All that decides an edition but its version.

    ``asked`` is what the user asked for; ``request`` has what lost kernels ask for as well.
    """

    origin: Origin
    asked: Request
    request: Request
    workspace: Workspace
    outcome: Outcome
    cuda: str
    tag: str
    libraries: Mapping[str, str]

    @property
    def public(self) -> str:
        return self.origin.version.public

    @property
    def tree(self) -> Path:
        return self.workspace.tree.root

    @property
    def home(self) -> str:
        """The .dist-info folder that the wheel came with."""
        return dist_info(self.workspace.tree).name

    @property
    def metadata(self) -> Message:
        text = (self.tree / self.home / "METADATA").read_text(encoding="utf-8")
        return HeaderParser().parsestr(text, headersonly=True)

    @property
    def ledger(self) -> Ledger:
        assert self.workspace.ledger is not None
        return self.workspace.ledger


def edition(draft: Draft) -> Edition:
    """The members of the new wheel, under a version that is a digest of them all.

    They are made twice: the version is in some of them, so the digest is taken with zeros there.
    """
    unlabelled = _members(draft, _label(draft, _UNLABELLED))
    lines = [f"{_FORMAT}\n{draft.origin.sha256}\n{draft.tag}\n"]
    lines += [
        f"{hashlib.sha256(data).hexdigest()}  {p}\n" for p, data in sorted(unlabelled.items())
    ]
    version = _label(draft, label_of(hashlib.sha256("".join(lines).encode()).hexdigest()))
    return Edition(
        filename=f"vllm-{version}-{draft.tag}.whl",
        home=(draft.home, f"vllm-{version}.dist-info"),
        members=_members(draft, version),
        facts=_facts(draft, version),
    )


def _label(draft: Draft, digest: str) -> str:
    """``0.25.1+cu130.gb10.0a1b2c3d4e``; a wheel of another CUDA than the target's says so."""
    target = draft.request.target
    own = target.cuda.partition(".")[0] == draft.cuda
    return f"{draft.public}+{target.cuda_tag if own else f'cu{draft.cuda}'}.{target.name}.{digest}"


def _members(draft: Draft, version: str) -> dict[str, bytes]:
    home = f"vllm-{version}.dist-info"
    facts = _facts(draft, version)
    own = {name: (draft.tree / draft.home / name).read_bytes() for name in ("METADATA", "WHEEL")}
    return {
        **dict(_patched(draft, version)),
        _OWN_VERSION: relabelled((draft.tree / _OWN_VERSION).read_bytes(), version),
        f"{home}/METADATA": _renamed(own["METADATA"], version),
        f"{home}/WHEEL": tagged(_BUILD.sub(b"", own["WHEEL"]), draft.tag),
        f"{home}/{FACTS}": as_text(facts).encode(),
        f"{home}/{_SBOM}": as_text(vllm_sbom(facts, _patches(draft))).encode(),
    }


def _patched(draft: Draft, version: str) -> Iterator[tuple[str, bytes]]:
    """Files that changed, upstream's texts of them, and the ledger as it has to be once installed.

    pip writes RECORD when it installs, so the ledger cannot know it; a revert restores its lines.
    """
    ledger, state = draft.ledger, draft.workspace.state
    files = _files(draft)
    for path in files:
        yield path, (draft.tree / path).read_bytes()
        original = original_path(state, path)
        if original.is_file():
            yield str(original.relative_to(draft.tree)), original.read_bytes()
    # Without its date: the wheel is the same on every day.
    shipped: Ledger = replace(ledger, files=files, version=version, date="")
    yield str(ledger_path(state).relative_to(draft.tree)), shipped.to_json()


def _files(draft: Draft) -> dict[str, tuple[str, str]]:
    """What the ledger says of files, RECORD left out."""
    pairs = draft.ledger.files.items()
    return {path: pair for path, pair in pairs if not path.startswith(f"{draft.home}/")}


def _patches(draft: Draft) -> Sequence[Patch]:
    """What each fix changed."""
    stock = draft.workspace.tree
    plan = Plan(request=draft.request, stock=stock, patched=stock, verdicts=draft.outcome.verdicts)
    return patches(plan.steps())


def _facts(draft: Draft, version: str) -> dict[str, Any]:
    origin, request, ledger = draft.origin, draft.request, draft.ledger
    return {
        "project": "vllm",
        "version": draft.public,
        "made": "repack",
        "patchkit": __version__,
        "recipe": ledger.recipe,
        "request": request_fields(draft.asked),
        "turned_on": sorted(draft.request.also - draft.asked.also),
        "source": origin.identity,
        "source_file": origin.name.filename,
        "upstream": origin.locked,
        "tree": f"sha256:{_tree_digest(draft)}",
        "fixes": [
            f"{v.fix.id}: {v.state.value}"
            for v in draft.outcome.verdicts
            if v.state is not State.NOT_APPLICABLE
        ],
        "target": request.target.name,
        "machine": origin.machine,
        "cuda": draft.cuda,
        "libraries": dict(draft.libraries),
        "license": {"vllm": draft.metadata.get("License-Expression", "NOASSERTION")},
        "wheel": version,
    }


def _tree_digest(draft: Draft) -> str:
    """A digest of the patched files: their paths and contents."""
    lines = [f"{after}  {path}\n" for path, (_before, after) in sorted(_files(draft).items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def relabelled(text: bytes, version: str) -> bytes:
    """``vllm/_version.py`` with another version, which ``vllm.__version__`` reads.

    Raises DriftError unless it is there once as a text and once as a tuple.
    """
    parsed = Version(version)
    parts = [*parsed.release, *([f"dev{parsed.dev}"] if parsed.dev is not None else [])]
    told = ", ".join(map(repr, [*parts, parsed.local]))
    swaps = {r"version = '[^']*'": f"version = '{version}'"}
    swaps[r"version_tuple = \([^()]*\)"] = f"version_tuple = ({told})"
    changed = text.decode()
    for pattern, replacement in swaps.items():
        changed, count = re.subn(rf"(?<=[ _]){pattern}(?=\n|$)", replacement, changed)
        if count != 1:
            raise DriftError(
                f"{_OWN_VERSION}: {count} places match {pattern!r}, expected 1",
                why="the wheel was made by other means than upstream's",
                hint="name upstream's wheel: patchkit repack vllm==X.Y.Z",
            )
    return changed.encode()


def _renamed(metadata: bytes, version: str) -> bytes:
    head, separator, body = metadata.partition(b"\n\n")
    changed, count = re.subn(rb"(?m)^Version:.*$", b"Version: " + version.encode(), head)
    if count != 1:
        raise DriftError(f"METADATA: has {count} lines that tell the version, expected 1")
    return changed + separator + body
