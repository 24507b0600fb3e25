"""Make the new members of a repacked wheel: patched files, ledger, version, facts and SBOM.

Everything here is text in, bytes out; ``rewrite_wheel`` puts it into the wheel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.parser import HeaderParser
from functools import cached_property
from pathlib import Path

from packaging.version import Version

from patchkit import __version__
from patchkit.digests import digest
from patchkit.elf import MAGIC, by_version
from patchkit.errors import DriftError
from patchkit.frozen import frozen
from patchkit.patching.commit import Applied
from patchkit.patching.fix import Request, State
from patchkit.patching.ledger import Ledger, LedgerRequest, ledger_path, original_path
from patchkit.patching.plan import patch_steps
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import Workspace
from patchkit.wheel.device.libraries import needed_versions
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.sbom import as_text, digest_label, wheel_sbom
from patchkit.wheel.file.wheelfile import FACTS, Facts
from patchkit.wheel.file.write import set_tag
from patchkit.wheel.vllm.native_parts import Kernels, NativeParts
from patchkit.wheel.vllm.repack_origin import Origin

_FORMAT = 1  # of the new wheel; goes up if the same request gives other bytes
_OWN_VERSION = "vllm/_version.py"
_UNLABELLED = "0" * 10
_SBOM = "sboms/patchkit.cdx.json"
# WHEEL repeats the build tag of the file name (PEP 427), which the new name has not.
_BUILD = re.compile(rb"^Build:.*\n", re.MULTILINE)


@frozen
class Additions:
    """The name of a repacked wheel, and every member of it that upstream's does not have.

    ``dist_info`` are the names of that folder in upstream's wheel and in the new one.
    """

    filename: str
    dist_info: tuple[str, str]
    members: Mapping[str, bytes]
    facts: Facts


@dataclass(frozen=True, kw_only=True)
class PatchedTree:
    """The unpacked wheel with its fixes.

    ``request`` is the user's; fixes that were ``turned_on`` besides keep vLLM from lost kernels.
    """

    origin: Origin
    request: Request
    turned_on: tuple[str, ...]
    workspace: Workspace
    outcome: Applied

    @property
    def root(self) -> Path:
        """The folder with the members of the wheel."""
        return self.workspace.tree.root

    @property
    def dist_info(self) -> Path:
        """The folder with the metadata."""
        return self.root / self.origin.wheel.dist_info

    @cached_property
    def ledger(self) -> Ledger | None:
        """The ledger as it has to be once installed, without the version; None without a fix.

        pip writes RECORD when it installs, so the ledger cannot know it; a revert restores its
        lines. The ledger has no date: the wheel is the same on every day.
        """
        ledger = self.workspace.ledger
        if ledger is None:
            return None
        files = {
            path: digests
            for path, digests in ledger.files.items()
            if not path.startswith(f"{self.dist_info.name}/")
        }
        return replace(ledger, files=files, date="")

    @property
    def files(self) -> Mapping[str, tuple[str, str]]:
        """The patched files, as the ledger has them: path → sha256 before and after."""
        return self.ledger.files if self.ledger else {}


def make_additions(
    patched: PatchedTree,
    kernels: Kernels,
    native: NativeParts,
) -> Additions:
    """Make the members of the new wheel; its version ends with a digest of them all.

    Some members contain the version: for the digest, they have zeros in its place.
    """
    origin = patched.origin
    target = patched.request.target
    tag = _wheel_tag(origin, kernels)
    # A wheel of another CUDA than the target's says so: 0.25.1+cu129.gb10.0a1b2c3d4e.
    cuda = f"cu{kernels.cuda}"
    if target.cuda.startswith(f"{kernels.cuda}."):
        cuda = target.cuda_tag

    label = f"{cuda}.{target.name}.{_UNLABELLED}"
    version = f"{origin.version.public}+{label}"

    facts = _repack_facts(patched, kernels, native, version)
    members = _patched_files(patched, version)
    members |= _metadata_files(patched, facts, tag)
    members |= native.members

    lines = [f"{_FORMAT}\n{origin.wheel.sha256}\n{tag}\n"]
    lines += [f"{digest(data)}  {path}\n" for path, data in sorted(members.items())]
    final = label.replace(_UNLABELLED, digest_label("".join(lines)))
    version = version.replace(label, final)

    labelled = {}
    for path, data in members.items():
        # A library does not hold its version, and is large.
        if not data.startswith(MAGIC):
            data = data.replace(label.encode(), final.encode())
        labelled[path.replace(label, final)] = data

    return Additions(
        filename=f"vllm-{version}-{tag}.whl",
        dist_info=(patched.dist_info.name, f"vllm-{version}.dist-info"),
        members=labelled,
        facts=facts | {"wheel": version},
    )


def _wheel_tag(origin: Origin, kernels: Kernels) -> str:
    """Return the tag of the wheel, with the glibc that its libraries need if that is newer."""
    tag = origin.wheel.name.tag
    promised = library_rules().promised_glibc(tag)
    needed = needed_versions(kernels.binaries).get("GLIBC", "")
    if not promised or by_version(needed) <= by_version(f"GLIBC_{promised}"):
        return tag

    glibc = "_".join(re.findall(r"\d+", needed)[:2])
    return f"{tag.rpartition('-')[0]}-manylinux_{glibc}_{origin.cpu}"


def _patched_files(patched: PatchedTree, version: str) -> dict[str, bytes]:
    """Return the files of the fixes: patched files, originals and the ledger."""
    if patched.ledger is None:
        return {}

    root = patched.root
    state = patched.workspace.state
    members = {path: (root / path).read_bytes() for path in patched.files}
    for path in patched.files:
        original = original_path(state, path)
        if original.is_file():
            members[str(original.relative_to(root))] = original.read_bytes()

    ledger = replace(patched.ledger, version=version)
    members[str(ledger_path(state).relative_to(root))] = ledger.to_json()
    return members


def _metadata_files(patched: PatchedTree, facts: Facts, tag: str) -> dict[str, bytes]:
    """Return the files that name the version, the tag and the facts."""
    version = facts["wheel"]
    home = f"vllm-{version}.dist-info"
    metadata = (patched.dist_info / "METADATA").read_bytes()
    head, gap, body = metadata.partition(b"\n\n")
    head = _replace_once(head, r"(?m)^Version:.*$", f"Version: {version}", "METADATA")
    wheel = _BUILD.sub(b"", (patched.dist_info / "WHEEL").read_bytes())

    steps = patch_steps(patched.workspace.tree, patched.outcome.verdicts)
    own_version = (patched.root / _OWN_VERSION).read_bytes()
    return {
        _OWN_VERSION: _relabelled(own_version, version),
        f"{home}/METADATA": head + gap + body,
        f"{home}/WHEEL": set_tag(wheel, tag),
        f"{home}/{FACTS}": as_text(facts).encode(),
        f"{home}/{_SBOM}": as_text(wheel_sbom(facts, steps)).encode(),
    }


def _repack_facts(
    patched: PatchedTree,
    kernels: Kernels,
    native: NativeParts,
    version: str,
) -> Facts:
    origin = patched.origin
    request = patched.request
    digests = [
        f"{after}  {path}\n" for path, (_, after) in sorted(patched.files.items())
    ]
    metadata = (patched.dist_info / "METADATA").read_text("utf-8")
    spdx = HeaderParser().parsestr(metadata).get("License-Expression", "NOASSERTION")
    facts = {
        "project": "vllm",
        "version": origin.version.public,
        "made": "repack",
        "patchkit": __version__,
        "recipe": load_recipe("vllm").digest,
        "request": LedgerRequest.of(request).fields(),
        "turned_on": list(patched.turned_on),
        "source": f"sha256:{origin.wheel.sha256}",
        "source_file": origin.wheel.name.filename,
        "upstream": origin.locked,
        "tree": f"sha256:{digest(''.join(digests))}",
        "fixes": fix_states(patched.outcome),
        "target": request.target.name,
        "machine": origin.cpu,
        "cuda": kernels.cuda,
        "libraries": {library.name: library.use.value for library in kernels.judged},
        "license": {"vllm": spdx},
        "wheel": version,
    }
    if native.facts:
        facts["native"] = native.facts

    return facts | request.patch_facts


def fix_states(outcome: Applied) -> list[str]:
    """Return the state of each fix that applies to the release, for the facts."""
    return [
        f"{verdict.fix.id}: {verdict.state.value}"
        for verdict in outcome.verdicts
        if verdict.state is not State.NOT_APPLICABLE
    ]


def _relabelled(text: bytes, version: str) -> bytes:
    """Return the text of ``vllm/_version.py`` with another version, as ``vllm.__version__``."""
    parsed = Version(version)
    parts: list[object] = list(parsed.release)
    if parsed.dev is not None:
        parts.append(f"dev{parsed.dev}")
    parts.append(version.partition("+")[2])
    as_tuple = ", ".join(map(repr, parts))

    # As setuptools-scm writes it: __version__ = version = '0.25.1'.
    begin = r"(?<=[ _])"
    end = r"(?=\n|$)"
    for pattern, line in (
        (r"version = '[^']*'", f"version = '{version}'"),
        (r"version_tuple = \([^()]*\)", f"version_tuple = ({as_tuple})"),
    ):
        text = _replace_once(text, f"{begin}{pattern}{end}", line, _OWN_VERSION)
    return text


def _replace_once(
    text: bytes,
    pattern: str,
    replacement: str,
    file: str,
) -> bytes:
    changed, count = re.subn(pattern, replacement, text.decode())
    if count != 1:
        raise DriftError(
            f"{file}: {count} lines match {pattern!r}, expected 1",
            why="the wheel was made by other means than upstream's",
            hint="name upstream's wheel: patchkit repack vllm==X.Y.Z",
        )
    return changed.encode()
