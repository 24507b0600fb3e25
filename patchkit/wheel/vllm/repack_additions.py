"""Make what is new in a repacked wheel: patched files, the ledger, its version, facts and SBOM.

Everything here is text in, bytes out; ``rewrite_wheel`` puts it into the wheel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from packaging.version import Version

from patchkit import __version__
from patchkit.digests import digest
from patchkit.elf import MAGIC
from patchkit.errors import DriftError
from patchkit.patching.commit import Applied
from patchkit.patching.fix import Request, State
from patchkit.patching.ledger import Ledger, LedgerRequest, ledger_path, original_path
from patchkit.patching.plan import patch_steps
from patchkit.patching.workspace import Workspace
from patchkit.wheel.file.sbom import as_text, digest_label, wheel_sbom
from patchkit.wheel.file.wheelfile import FACTS
from patchkit.wheel.file.write import set_tag
from patchkit.wheel.vllm.native_parts import NativeParts
from patchkit.wheel.vllm.repack_origin import Origin

_FORMAT = 1  # of what rewrite writes; goes up if the same request gives other bytes
_OWN_VERSION = "vllm/_version.py"
_UNLABELLED = "0" * 10
_SBOM = "sboms/patchkit.cdx.json"
# WHEEL repeats the build tag of the file name (PEP 427), which the new name has not.
_BUILD = re.compile(rb"^Build:.*\n", re.MULTILINE)


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
    ``recipe`` is the digest of the recipe. ``dist_info`` is the name of that folder in the tree,
    ``license`` the one METADATA names.
    """

    origin: Origin
    asked: Request
    request: Request
    workspace: Workspace
    outcome: Applied
    recipe: str
    dist_info: str
    license: str
    cuda: str
    tag: str
    libraries: Mapping[str, str]
    native: NativeParts = field(default_factory=NativeParts)

    @cached_property
    def ledger(self) -> Ledger | None:
        """The ledger as it has to be once installed, without the version; None without a fix.

        pip writes RECORD when it installs, so it cannot know that; a revert restores its lines. It
        has no date: the wheel is the same on every day.
        """
        ledger = self.workspace.ledger
        if ledger is None:
            return None
        own = f"{self.dist_info}/"
        files = {p: pair for p, pair in ledger.files.items() if not p.startswith(own)}
        return replace(ledger, files=files, date="")

    @property
    def files(self) -> Mapping[str, tuple[str, str]]:
        """The patched files, as the ledger has them: path → sha256 before and after."""
        return self.ledger.files if self.ledger else {}


def make_additions(patched: PatchedTree) -> Additions:
    """Make the members of the new wheel, under a version that is a digest of them all.

    The version is in some of them: the digest is taken with zeros in its place.
    """
    origin, target, tree = (
        patched.origin,
        patched.request.target,
        patched.workspace.tree.root,
    )
    own = patched.dist_info
    # A wheel of another CUDA than the target's says so: 0.25.1+cu129.gb10.0a1b2c3d4e.
    cuda = (
        target.cuda_tag
        if target.cuda.startswith(f"{patched.cuda}.")
        else f"cu{patched.cuda}"
    )
    label = f"{cuda}.{target.name}.{_UNLABELLED}"
    version = f"{origin.version.public}+{label}"
    home, facts = f"vllm-{version}.dist-info", _repack_facts(patched, version)
    steps = patch_steps(patched.workspace.tree, patched.outcome.verdicts)
    members = _patched_files(patched, version)
    wheel = _BUILD.sub(b"", (tree / own / "WHEEL").read_bytes())
    head, gap, body = (tree / own / "METADATA").read_bytes().partition(b"\n\n")
    head = _replace_once(head, r"(?m)^Version:.*$", f"Version: {version}", "METADATA")
    members |= {
        _OWN_VERSION: _relabelled((tree / _OWN_VERSION).read_bytes(), version),
        f"{home}/METADATA": head + gap + body,
        f"{home}/WHEEL": set_tag(wheel, patched.tag),
        f"{home}/{FACTS}": as_text(facts).encode(),
        f"{home}/{_SBOM}": as_text(wheel_sbom(facts, steps)).encode(),
    }
    members |= {
        each.name: each.path.read_bytes()
        for each in patched.native.libraries
        if each.path
    }
    lines = [f"{_FORMAT}\n{origin.wheel.sha256}\n{patched.tag}\n"]
    lines += [f"{digest(data)}  {path}\n" for path, data in sorted(members.items())]
    final = label.replace(_UNLABELLED, digest_label("".join(lines)))
    version = version.replace(label, final)
    return Additions(
        filename=f"vllm-{version}-{patched.tag}.whl",
        dist_info=(own, f"vllm-{version}.dist-info"),
        members={
            # A library does not hold its version, and is large.
            path.replace(label, final): data
            if data.startswith(MAGIC)
            else data.replace(label.encode(), final.encode())
            for path, data in members.items()
        },
        facts=facts | {"wheel": version},
    )


def _patched_files(patched: PatchedTree, version: str) -> dict[str, bytes]:
    """Return what the fixes leave in the wheel: patched files, originals and the ledger."""
    if patched.ledger is None:
        return {}
    tree, state = patched.workspace.tree.root, patched.workspace.state
    members = {path: (tree / path).read_bytes() for path in patched.files}
    for original in (original_path(state, path) for path in patched.files):
        if original.is_file():
            members[str(original.relative_to(tree))] = original.read_bytes()

    ledger = replace(patched.ledger, version=version)
    members[str(ledger_path(state).relative_to(tree))] = ledger.to_json()
    return members


def _repack_facts(patched: PatchedTree, version: str) -> dict[str, Any]:
    origin = patched.origin
    digests = (
        f"{after}  {path}\n" for path, (_, after) in sorted(patched.files.items())
    )
    return {
        "project": "vllm",
        "version": origin.version.public,
        "made": "repack",
        "patchkit": __version__,
        "recipe": patched.recipe,
        "request": LedgerRequest.of(patched.asked).fields(),
        "turned_on": sorted(patched.request.also - patched.asked.also),
        **patched.request.patch_facts,
        "source": f"sha256:{origin.wheel.sha256}",
        "source_file": origin.wheel.name.filename,
        "upstream": origin.locked,
        "tree": f"sha256:{digest(''.join(digests))}",
        "fixes": [
            f"{v.fix.id}: {v.state.value}"
            for v in patched.outcome.verdicts
            if v.state is not State.NOT_APPLICABLE
        ],
        "target": patched.request.target.name,
        "machine": origin.cpu,
        "cuda": patched.cuda,
        "libraries": dict(patched.libraries),
        **({"native": patched.native.facts} if patched.native.facts else {}),
        "license": {"vllm": patched.license},
        "wheel": version,
    }


def _relabelled(text: bytes, version: str) -> bytes:
    """Return ``vllm/_version.py`` with another version, which ``vllm.__version__`` reads."""
    parsed = Version(version)
    parts = [*parsed.release, *([f"dev{parsed.dev}"] if parsed.dev is not None else [])]
    as_tuple = ", ".join(map(repr, [*parts, version.partition("+")[2]]))
    # As setuptools-scm writes it: __version__ = version = '0.25.1'.
    begin, end = r"(?<=[ _])", r"(?=\n|$)"
    text = _replace_once(
        text, f"{begin}version = '[^']*'{end}", f"version = '{version}'", _OWN_VERSION
    )
    pattern = rf"{begin}version_tuple = \([^()]*\){end}"
    return _replace_once(text, pattern, f"version_tuple = ({as_tuple})", _OWN_VERSION)


def _replace_once(text: bytes, pattern: str, replacement: str, file: str) -> bytes:
    changed, count = re.subn(pattern, replacement, text.decode())
    if count != 1:
        raise DriftError(
            f"{file}: {count} lines match {pattern!r}, expected 1",
            why="the wheel was made by other means than upstream's",
            hint="name upstream's wheel: patchkit repack vllm==X.Y.Z",
        )
    return changed.encode()
