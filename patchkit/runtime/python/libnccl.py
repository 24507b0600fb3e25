"""Tell which libnccl torch and vLLM would load in a Python environment, and why.

Nothing is imported: the Python that is asked about says where it finds what and what is mapped
already, and the rest follows from the files: torch's own preload, its DT_RPATH, and the rules of
the dynamic loader.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import HostError
from patchkit.runtime.python.distributions import distributions, headers
from patchkit.runtime.python.file_owners import Owner, lost_files, owners
from patchkit.runtime.python.interpreter import InterpreterFacts, ask
from patchkit.runtime.python.libnccl_version import nccl_version
from patchkit.runtime.python.loader import Process, read_loadable
from patchkit.runtime.python.startup import (
    PRELOAD,
    SONAME,
    STARTUP,
    STEM,
    VARIABLE,
    Choice,
    preloads,
    started,
    torch_choice,
    vllm_choice,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclCopy:
    """One libnccl file. ``version`` is what the library says of itself, ``""`` if nothing.

    ``found`` says what leads there; ``fits`` is whether this Python could load it.
    """

    path: str
    version: str
    sha256: str
    owners: tuple[Owner, ...]
    found: str
    fits: bool
    mapped: bool

    def __str__(self) -> str:
        return f"{self.path} ({self.version or 'of unknown version'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of ``loaded``; ``copies`` with those that are mapped first, in their order.

    ``pin`` is what torch's METADATA requires, ``nvidia-nccl-cu13==2.28.9``, "" if it says nothing.
    """

    python: str
    torch_version: str
    vllm_version: str
    torch: Choice
    vllm: Choice
    copies: tuple[NcclCopy, ...]
    warnings: tuple[str, ...]
    pin: str = ""
    notes: tuple[str, ...] = ()


def loaded(python: str, environment: Mapping[str, str]) -> Answer:
    """Return what torch and vLLM would load for ``python``, started with these variables.

    Raises HostError if this is not a Python, or has no torch.
    """
    facts = ask(python, environment)
    if facts.torch is None:
        raise HostError(
            f"{python}: has no torch",
            hint="name the Python that has it with --python, for example venv/bin/python",
        )
    process = started(facts, environment)
    # In this order: vLLM finds what torch has mapped already.
    torch, vllm = torch_choice(process, facts), vllm_choice(process, facts)
    copies = tuple(_nccl_copies(process, facts))
    taken = next((copy for copy in copies if copy.path == torch.path), None)
    pin = _torch_pin(facts)
    beside = list(_beside_pin(taken, pin, facts))
    return Answer(
        python=python,
        torch_version=facts.release("torch"),
        vllm_version=facts.release("vllm"),
        torch=torch,
        vllm=vllm,
        copies=copies,
        warnings=(
            *_all_warnings(torch, vllm, copies, process, facts),
            *(text for older, text in beside if older),
            *(f"{each}, is gone" for each in lost_files(facts.path, STEM)),
        ),
        pin=pin,
        notes=tuple(text for older, text in beside if not older),
    )


_PIN = re.compile(r"(?P<project>nvidia-nccl-cu\d+)\s*\(?==\s*(?P<version>\d[\w.]*)")

# The copies


def _nccl_copies(process: Process, facts: InterpreterFacts) -> Iterator[NcclCopy]:
    """Yield every file once, whatever names it has."""
    # A copy that is mapped is named by the path by which it came in.
    places = {os.path.realpath(each.path): (each.path, each.why, True) for each in process.mapped}
    for path, found in _candidate_paths(process, facts):
        if Path(path).is_file():
            places.setdefault(os.path.realpath(path), (path, found, False))
    known = owners(facts.path, STEM)
    for real, (path, found, mapped) in places.items():
        try:
            with Path(real).open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            sha256 = ""
        yield NcclCopy(
            path=path,
            version=nccl_version(Path(real)),
            sha256=sha256,
            owners=known.get(real, ()),
            found=found,
            fits=mapped or process.fits(read_loadable(path)),
            mapped=mapped,
        )


def _candidate_paths(process: Process, facts: InterpreterFacts) -> Iterator[tuple[str, str]]:
    """Yield where a libnccl may lie, whether it is taken or not, and what leads there."""
    for folder in process.library_path:
        yield f"{folder}/{SONAME}", "LD_LIBRARY_PATH"
    for entry in facts.path:
        for place in sorted(Path(entry).glob(f"nvidia/nccl/lib/{STEM}*")):
            yield str(place), "on sys.path"
    yield str(facts.torch_home / "lib" / SONAME), "beside torch's libraries"
    for path in process.cache.get(SONAME, ()):
        yield path, "the system's ld.so.cache"


# What torch was released with


def _torch_pin(facts: InterpreterFacts) -> str:
    for home in distributions(facts.path).get("torch", ())[:1]:
        for requirement in headers(home, "Requires-Dist"):
            if match := _PIN.match(requirement):
                return f"{match['project']}=={match['version']}"
    return ""


def _beside_pin(
    taken: NcclCopy | None, pin: str, facts: InterpreterFacts
) -> Iterator[tuple[bool, str]]:
    """Yield whether the release that torch takes is older than the pinned one, and what that means.

    A later one is what an override leaves behind, and nothing wrong.
    """
    version, wanted = taken.version if taken else "", pin.partition("==")[2]
    if not version or not wanted or _version_numbers(version) == _version_numbers(wanted):
        return
    torch = f"torch {facts.release('torch')} pins {pin}, and {version.partition('+')[0]} is taken"
    if _version_numbers(version) < _version_numbers(wanted):
        yield True, f"{torch}: torch may call what an older NCCL lacks"
    else:
        left = "as an override of that pin leaves it: `pip check` names it"
        back = f"to install torch or vLLM again without --no-deps puts {wanted} back"
        yield False, f"{torch}, {left}, and {back}"


def _version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())


# What to be warned of


def _all_warnings(
    torch: Choice,
    vllm: Choice,
    copies: tuple[NcclCopy, ...],
    process: Process,
    facts: InterpreterFacts,
) -> Iterator[str]:
    yield from _split_warnings(torch, vllm, copies)
    for copy in copies:
        yield from _unused_warnings(copy, torch, vllm)
        yield from _owner_warnings(copy)
    yield from _preload_warnings(process, facts)


def _split_warnings(torch: Choice, vllm: Choice, copies: tuple[NcclCopy, ...]) -> Iterator[str]:
    by_path = {copy.path: copy for copy in copies}
    if torch.path and vllm.path and torch.path != vllm.path:
        one, other = by_path[torch.path], by_path[vllm.path]
        same = "the same bytes twice" if one.sha256 == other.sha256 else "not the same bytes"
        yield f"two NCCLs in one process, {same}: torch takes {one}, vLLM {other}"
    for choice, who in ((torch, "torch"), (vllm, "vLLM")):
        if choice.path is None:
            yield f"{who} takes none: {choice.why}"


def _unused_warnings(copy: NcclCopy, torch: Choice, vllm: Choice) -> Iterator[str]:
    if copy.path in (torch.path, vllm.path):
        return
    if copy.mapped:
        yield f"{copy} is mapped as well ({copy.found}), and nobody calls it"
    elif copy.found == "LD_LIBRARY_PATH":
        why = f"torch's is {torch.why}" if copy.fits else "it is not for this CPU, or damaged"
        yield f"LD_LIBRARY_PATH leads to {copy}, which is not taken: {why}"


def _owner_warnings(copy: NcclCopy) -> Iterator[str]:
    names = " and ".join(map(str, copy.owners))
    # Of several owners the one with these bytes was installed last.
    writers = [str(owner) for owner in copy.owners if owner.sha256 == copy.sha256]
    if len(copy.owners) > 1:
        whose = f", and its bytes are those of {writers[0]}" if writers else ""
        yield f"{copy.path} belongs to {names}{whose}: uninstalling one deletes it for the other"
    if not writers and any(owner.sha256 for owner in copy.owners):
        yield f"{copy.path} was changed after {names} was installed: pip does not know"
    for owner in copy.owners if len(copy.owners) == 1 else ():
        if copy.version and owner.version.partition("+")[0] != copy.version.partition("+")[0]:
            yield f"{copy} says another version than the package {owner}"


def _preload_warnings(process: Process, facts: InterpreterFacts) -> Iterator[str]:
    there = {os.path.realpath(each.path) for each in process.mapped}
    for entry in preloads(process.environment):
        if "nccl" in entry and "/" in entry and os.path.realpath(entry) not in there:
            yield f"{PRELOAD} names {entry}, which the loader could not take"
    named = process.environment.get(VARIABLE)
    if named and named.startswith("~"):
        yield f"{VARIABLE} is {named}: nobody replaces the ~ by a home folder"
    if any(each.why == STARTUP for each in process.mapped):
        for place in _startup_files(facts):
            yield f"{place} names libnccl: it may be what loads a copy before torch"


def _startup_files(facts: InterpreterFacts) -> Iterator[Path]:
    for entry in dict.fromkeys(facts.path):
        for pattern in ("*.pth", "sitecustomize.py", "usercustomize.py"):
            for place in sorted(Path(entry).glob(pattern)):
                if b"libnccl" in place.read_bytes():
                    yield place
