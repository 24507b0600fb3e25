"""Make what is new in a repacked wheel: patched files, the ledger, its version, facts and SBOM.

Everything here is text in, bytes out; ``write.rewrite`` puts it into the wheel.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.version import Version

from patchkit import __version__
from patchkit.errors import DriftError
from patchkit.patching.commit import Applied
from patchkit.patching.fix import Request, State
from patchkit.patching.ledger import Ledger, LedgerRequest, ledger_path, original_path
from patchkit.patching.plan import Plan
from patchkit.patching.workspace import Workspace
from patchkit.wheel.file.sbom import as_text, label_of, vllm_sbom
from patchkit.wheel.file.wheelfile import FACTS
from patchkit.wheel.file.write import set_tag
from patchkit.wheel.vllm.repack_origin import Origin

_FORMAT = 1  # of what rewrite writes; goes up if the same request gives other bytes
_OWN_VERSION = "vllm/_version.py"
_UNLABELLED = "0" * 10
_SBOM = "sboms/patchkit.cdx.json"
# WHEEL repeats the build tag of the file name (PEP 427), which the new name has not.
_BUILD = re.compile(rb"^Build:.*\n", re.MULTILINE)
_ANEW = "name upstream's wheel: patchkit repack vllm==X.Y.Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """The name of a repacked wheel, and every member of it that upstream's does not have.

    ``dist_info`` are the names of that folder in upstream's wheel and in the new one.
    """

    filename: str
    dist_info: tuple[str, str]
    members: Mapping[str, bytes]
    facts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PatchedTree:
    """The unpacked wheel with its fixes, and all else that decides the new wheel's bytes.

    ``asked`` is the user's request; ``request`` adds the fixes that lost kernels ask for.
    ``dist_info`` is the name of that folder in the tree, ``license`` the one METADATA names.
    """

    origin: Origin
    asked: Request
    request: Request
    workspace: Workspace
    outcome: Applied
    dist_info: str
    license: str
    cuda: str
    tag: str
    libraries: Mapping[str, str]

    @cached_property
    def tree(self) -> Path:
        return self.workspace.tree.root

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger as it has to be once installed, without the version.

        pip writes RECORD when it installs, so it cannot know that; a revert restores its lines. It
        has no date: the wheel is the same on every day.
        """
        ledger = self.workspace.ledger
        assert ledger is not None
        own = f"{self.dist_info}/"
        files = {p: pair for p, pair in ledger.files.items() if not p.startswith(own)}
        return replace(ledger, files=files, date="")


def make_additions(patched: PatchedTree) -> Additions:
    """Make the members of the new wheel, under a version that is a digest of them all.

    They are made twice: the version is in some of them, so the digest is taken with zeros there.
    """
    origin, target = patched.origin, patched.request.target
    # A wheel of another CUDA than the target's says so: 0.25.1+cu129.gb10.0a1b2c3d4e.
    own = target.cuda.partition(".")[0] == patched.cuda
    label = f"{target.cuda_tag if own else f'cu{patched.cuda}'}.{target.name}"
    version = f"{origin.version.public}+{label}"
    unlabelled, _facts = _make_members(patched, f"{version}.{_UNLABELLED}")
    lines = [f"{_FORMAT}\n{origin.wheel.sha256}\n{patched.tag}\n"]
    lines += [
        f"{hashlib.sha256(data).hexdigest()}  {p}\n" for p, data in sorted(unlabelled.items())
    ]
    version += f".{label_of(hashlib.sha256(''.join(lines).encode()).hexdigest())}"
    members, facts = _make_members(patched, version)
    return Additions(
        filename=f"vllm-{version}-{patched.tag}.whl",
        dist_info=(patched.dist_info, f"vllm-{version}.dist-info"),
        members=members,
        facts=facts,
    )


def _make_members(patched: PatchedTree, version: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Make the members and the facts under a version."""
    tree, state, ledger = patched.tree, patched.workspace.state, patched.ledger
    home = f"vllm-{version}.dist-info"
    metadata, wheel = (
        (tree / patched.dist_info / name).read_bytes() for name in ("METADATA", "WHEEL")
    )
    members = {}
    for path in ledger.files:
        members[path] = (tree / path).read_bytes()
        original = original_path(state, path)
        if original.is_file():
            members[str(original.relative_to(tree))] = original.read_bytes()
    shipped: Ledger = replace(ledger, version=version)
    facts = _repack_facts(patched, version)
    stock = patched.workspace.tree
    # Only its steps are asked for, and they begin with upstream's texts.
    plan = Plan(
        request=patched.request, stock=stock, patched=stock, verdicts=patched.outcome.verdicts
    )
    members |= {
        str(ledger_path(state).relative_to(tree)): shipped.to_json(),
        _OWN_VERSION: relabelled((tree / _OWN_VERSION).read_bytes(), version),
        f"{home}/METADATA": _set_version(metadata, version),
        f"{home}/WHEEL": set_tag(_BUILD.sub(b"", wheel), patched.tag),
        f"{home}/{FACTS}": as_text(facts).encode(),
        f"{home}/{_SBOM}": as_text(vllm_sbom(facts, plan.steps())).encode(),
    }
    return members, facts


def _repack_facts(patched: PatchedTree, version: str) -> dict[str, Any]:
    origin, ledger = patched.origin, patched.ledger
    digests = (f"{after}  {path}\n" for path, (_, after) in sorted(ledger.files.items()))
    return {
        "project": "vllm",
        "version": origin.version.public,
        "made": "repack",
        "patchkit": __version__,
        "recipe": ledger.recipe,
        "request": LedgerRequest.of(patched.asked).fields(),
        "turned_on": sorted(patched.request.also - patched.asked.also),
        "source": f"sha256:{origin.wheel.sha256}",
        "source_file": origin.wheel.name.filename,
        "upstream": origin.locked,
        "tree": f"sha256:{hashlib.sha256(''.join(digests).encode()).hexdigest()}",
        "fixes": [
            f"{v.fix.id}: {v.state.value}"
            for v in patched.outcome.verdicts
            if v.state is not State.NOT_APPLICABLE
        ],
        "target": patched.request.target.name,
        "machine": origin.cpu,
        "cuda": patched.cuda,
        "libraries": dict(patched.libraries),
        "license": {"vllm": patched.license},
        "wheel": version,
    }


def relabelled(text: bytes, version: str) -> bytes:
    """Return ``vllm/_version.py`` with another version, which ``vllm.__version__`` reads.

    Raises DriftError unless it is there once as a text and once as a tuple.
    """
    parsed = Version(version)
    parts = [*parsed.release, *([f"dev{parsed.dev}"] if parsed.dev is not None else [])]
    as_tuple = ", ".join(map(repr, [*parts, parsed.local]))
    # As setuptools-scm writes it: __version__ = version = '0.25.1'.
    swaps = {r"version = '[^']*'": f"version = '{version}'"}
    swaps[r"version_tuple = \([^()]*\)"] = f"version_tuple = ({as_tuple})"
    changed = text.decode()
    for pattern, replacement in swaps.items():
        changed, count = re.subn(rf"(?<=[ _]){pattern}(?=\n|$)", replacement, changed)
        if count != 1:
            raise DriftError(
                f"{_OWN_VERSION}: {count} lines match {pattern!r}, expected 1",
                why="the wheel was made by other means than upstream's",
                hint=_ANEW,
            )
    return changed.encode()


def _set_version(metadata: bytes, version: str) -> bytes:
    head, separator, body = metadata.partition(b"\n\n")
    changed, count = re.subn(rb"(?m)^Version:.*$", b"Version: " + version.encode(), head)
    if count != 1:
        raise DriftError(
            f"METADATA: has {count} lines with a version, expected 1",
            why="the wheel was made by other means than upstream's",
            hint=_ANEW,
        )
    return changed + separator + body
