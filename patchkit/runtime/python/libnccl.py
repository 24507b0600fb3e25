"""Tell which libnccl torch and vLLM would load in a Python environment, and why.

Nothing is imported. The Python itself says where it finds packages and which files it has mapped.
The dynamic loader says what torch's libraries need. The source text of torch says what it preloads.
"""

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from patchkit.digests import sha256_if_readable
from patchkit.errors import HostError
from patchkit.frozen import Texts, Values, frozen
from patchkit.runtime.python import startup
from patchkit.runtime.python.distributions import (
    Owner,
    find_distributions,
    find_owners,
    find_version,
    lost_files,
    read_headers,
)
from patchkit.runtime.rules.releases import release

_PIN = r"(?P<project>nvidia-nccl-cu\d+)\s*\(?==\s*(?P<version>\d[\w.]*)"
_VERSION = rb"NCCL version (\d[\w.]*\+cuda[\d.]+)"


@frozen
class NcclCopy:
    """One libnccl file.

    ``version`` is the version that the file states, "" if none; ``found`` says why it was found.
    ``mapped`` is True if torch or vLLM would map the file.
    """

    path: str
    version: str
    sha256: str
    owners: tuple[Owner, ...]
    found: str
    mapped: bool

    def __str__(self) -> str:
        return f"{self.path} ({self.version or 'of unknown version'})"


@frozen
class NcclReport:
    """The libnccl that torch and vLLM would load in a Python, and all copies of it that were found.

    ``copies`` begins with the mapped copies, in the order of loading. ``pin`` is the requirement in
    torch's METADATA, ``nvidia-nccl-cu13==2.28.9``, "" if there is none.
    """

    python: str
    torch_version: str
    vllm_version: str
    torch: startup.Choice
    vllm: startup.Choice
    copies: tuple[NcclCopy, ...]
    warnings: Texts
    pin: str


def find_loaded_nccl(python: str, environment: Values) -> NcclReport:
    """Return the libnccl that torch and vLLM would load in ``python`` under these variables.

    Raises HostError if that Python cannot be asked or has no torch.
    """
    facts = startup.ask_interpreter(python, environment)
    if facts.torch is None:
        raise HostError(
            f"{python}: has no torch",
            hint="name the Python that has it with --python, for example venv/bin/python",
        )

    process = startup.start_process(facts, environment)
    # torch must come first: vLLM gets what torch has mapped already.
    torch = startup.choose_for_torch(process)
    vllm = startup.choose_for_vllm(process)
    report = NcclReport(
        python=python,
        torch_version=find_version(facts.path, "torch"),
        vllm_version=find_version(facts.path, "vllm"),
        torch=torch,
        vllm=vllm,
        copies=tuple(_find_copies(process)),
        pin=_read_pin(facts),
        warnings=(),
    )

    lost = (
        f"{owner.path}, which {owner} has installed, is gone"
        for owner in lost_files(facts.path, startup.STEM)
    )
    return replace(report, warnings=(*_find_warnings(report), *lost))


def _read_pin(facts: startup.InterpreterFacts) -> str:
    """Return the NCCL that torch's METADATA requires, ``nvidia-nccl-cu13==2.28.9``, or ""."""
    for home in find_distributions(facts.path).get("torch", ())[:1]:
        for requirement in read_headers(home, "Requires-Dist"):
            if pin := re.match(_PIN, requirement):
                return f"{pin['project']}=={pin['version']}"

    return ""


def nccl_version(place: Path) -> str:
    """Return the version that a libnccl file states, ``2.30.7+cuda13.3``.

    Returns "" if the file states none or cannot be read.
    """
    # mmap raises ValueError for an empty file.
    with (
        suppress(OSError, ValueError),
        place.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        if match := re.search(_VERSION, data):
            return match[1].decode()

    return ""


def _find_copies(process: startup.SimulatedProcess) -> Iterator[NcclCopy]:
    """Yield each libnccl file once, even if nothing loads it or several links lead to it."""
    # Mapped copies go first, so that each is reported under the path by which it was loaded.
    reasons = {mapped.path: mapped.why for mapped in process.mapped}
    mapped_files = {os.path.realpath(path) for path in reasons}
    for path, reason in _find_candidates(process):
        if Path(path).is_file():
            reasons.setdefault(path, reason)

    owners_by_file = find_owners(process.facts.path, startup.STEM)
    listed_files = set()

    for path, reason in reasons.items():
        file = os.path.realpath(path)
        if file in listed_files:
            continue

        listed_files.add(file)
        yield NcclCopy(
            path=path,
            version=nccl_version(Path(file)),
            sha256=sha256_if_readable(Path(file)),
            owners=owners_by_file.get(file, ()),
            found=reason,
            mapped=file in mapped_files,
        )


def _find_candidates(process: startup.SimulatedProcess) -> Iterator[tuple[str, str]]:
    """Yield each path at which a libnccl may be, and the reason to look there."""
    for folder in process.library_path():
        yield f"{folder}/{startup.SONAME}", "LD_LIBRARY_PATH"

    for entry in process.facts.path:
        for place in sorted(Path(entry).glob(f"nvidia/nccl/lib/{startup.STEM}*")):
            yield str(place), "on sys.path"

    beside_torch = process.facts.torch_home / "lib" / startup.SONAME
    yield str(beside_torch), "beside torch's libraries"


def _find_warnings(report: NcclReport) -> Iterator[str]:
    copies = {copy.path: copy for copy in report.copies}
    torch = copies.get(report.torch.path or "")
    vllm = copies.get(report.vllm.path or "")

    if torch and vllm and torch is not vllm:
        is_same = torch.sha256 == vllm.sha256
        comparison = "the same bytes twice" if is_same else "not the same bytes"
        yield f"two NCCLs in one process, {comparison}: torch takes {torch}, vLLM {vllm}"

    for program, choice in (("torch", report.torch), ("vLLM", report.vllm)):
        if choice.path is None:
            yield f"{program} takes none: {choice.why}"

    for copy in report.copies:
        if copy not in (torch, vllm):
            yield from _warn_of_unused(copy, report.torch)
        if len(copy.owners) > 1:
            names = " and ".join(map(str, copy.owners))
            yield f"{copy.path} belongs to {names}: uninstalling one deletes it for the other"

    if torch:
        yield from _warn_of_older(torch, report)


def _warn_of_unused(copy: NcclCopy, torch: startup.Choice) -> Iterator[str]:
    if copy.mapped:
        yield f"{copy} is mapped as well ({copy.found}), and nobody calls it"
    elif copy.found == "LD_LIBRARY_PATH":
        yield f"LD_LIBRARY_PATH leads to {copy}, which is not taken: torch's is {torch.why}"


def _warn_of_older(torch_copy: NcclCopy, report: NcclReport) -> Iterator[str]:
    """Yield a warning if torch loads an older NCCL than its METADATA requires."""
    version = torch_copy.version.partition("+")[0]
    pinned = report.pin.partition("==")[2]
    if version and pinned and release(version) < release(pinned):
        yield (
            f"torch {report.torch_version} pins {report.pin}, and {version} is taken: "
            "torch may call what an older NCCL lacks"
        )
