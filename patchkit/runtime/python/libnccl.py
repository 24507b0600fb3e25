"""Tell which libnccl torch and vLLM would load in a Python environment, and why.

Nothing is imported: the Python that is asked about says where it finds what and what is mapped
already, the dynamic loader what torch's libraries need, and torch's own text what it preloads.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from patchkit.digests import sha256_if_readable
from patchkit.errors import HostError
from patchkit.runtime.python import startup
from patchkit.runtime.python.distributions import (
    Owner,
    distributions,
    find_version,
    headers,
    lost_files,
    owners,
)
from patchkit.runtime.rules.releases import release

_PIN = re.compile(r"(?P<project>nvidia-nccl-cu\d+)\s*\(?==\s*(?P<version>\d[\w.]*)")
# Found as a literal first: a pattern over 300 MB of device code takes far longer.
_WORDS = b"NCCL version "
_VERSION = re.compile(rb"NCCL version (\d[\w.]*\+cuda[\d.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclCopy:
    """One libnccl file: its own word on its ``version``; ``found`` says what leads there."""

    path: str
    version: str
    sha256: str
    owners: tuple[Owner, ...]
    found: str
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
    torch: startup.Choice
    vllm: startup.Choice
    copies: tuple[NcclCopy, ...]
    warnings: tuple[str, ...]
    pin: str = ""


def loaded(python: str, environment: Mapping[str, str]) -> Answer:
    """Return what torch and vLLM would load under these variables. Raises HostError."""
    facts = startup.ask_interpreter(python, environment)
    if facts.torch is None:
        raise HostError(
            f"{python}: has no torch",
            hint="name the Python that has it with --python, for example venv/bin/python",
        )
    process = startup.start_process(facts, environment)
    # In this order: vLLM finds what torch has mapped already.
    torch, vllm = startup.torch_choice(process), startup.vllm_choice(process)
    copies = tuple(_nccl_copies(process, facts))
    torch_homes = distributions(facts.path).get("torch", ())[:1]
    requires = (text for home in torch_homes for text in headers(home, "Requires-Dist"))
    pins = (
        f"{pin['project']}=={pin['version']}"
        for pin in map(_PIN.match, requires)
        if pin
    )
    answer = Answer(
        python=python,
        torch_version=find_version(facts.path, "torch"),
        vllm_version=find_version(facts.path, "vllm"),
        torch=torch,
        vllm=vllm,
        copies=copies,
        pin=next(pins, ""),
        warnings=(),
    )
    gone = (f"{file}, is gone" for file in lost_files(facts.path, startup.STEM))
    return replace(answer, warnings=(*_find_warnings(answer), *gone))


def nccl_version(place: Path) -> str:
    """Return ``2.30.7+cuda13.3``; "" if the file does not say, or cannot be read."""
    try:
        with (
            place.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            start = data.find(_WORDS)
            while start >= 0:
                if match := _VERSION.match(data, start):
                    return match[1].decode()
                start = data.find(_WORDS, start + 1)
    except (OSError, ValueError):  # an empty file cannot be mapped
        pass
    return ""


def _nccl_copies(
    process: startup.Process, facts: startup.InterpreterFacts
) -> Iterator[NcclCopy]:
    """Yield every file once, whether it is taken or not, and whatever names it has."""
    folders = process.library_path()
    candidates = [
        (f"{folder}/{startup.SONAME}", "LD_LIBRARY_PATH") for folder in folders
    ]
    places = (
        sorted(Path(entry).glob(f"nvidia/nccl/lib/{startup.STEM}*"))
        for entry in facts.path
    )
    candidates += [(str(place), "on sys.path") for found in places for place in found]
    candidates += [
        (str(facts.torch_home / "lib" / startup.SONAME), "beside torch's libraries")
    ]
    # A copy that is mapped is named by the path by which it came in.
    copies = {
        os.path.realpath(each.path): (each.path, each.why, True)
        for each in process.mapped
    }
    for path, found in candidates:
        if Path(path).is_file():
            copies.setdefault(os.path.realpath(path), (path, found, False))
    known = owners(facts.path, startup.STEM)
    for real, (path, found, mapped) in copies.items():
        yield NcclCopy(
            path=path,
            version=nccl_version(Path(real)),
            sha256=sha256_if_readable(Path(real)),
            owners=known.get(real, ()),
            found=found,
            mapped=mapped,
        )


def _find_warnings(answer: Answer) -> Iterator[str]:
    copies = {copy.path: copy for copy in answer.copies}
    torch, vllm = (
        copies.get(choice.path or "") for choice in (answer.torch, answer.vllm)
    )
    if torch and vllm and torch is not vllm:
        same = (
            "the same bytes twice"
            if torch.sha256 == vllm.sha256
            else "not the same bytes"
        )
        yield f"two NCCLs in one process, {same}: torch takes {torch}, vLLM {vllm}"
    for choice, who in ((answer.torch, "torch"), (answer.vllm, "vLLM")):
        if choice.path is None:
            yield f"{who} takes none: {choice.why}"
    for copy in answer.copies:
        if copy not in (torch, vllm) and copy.mapped:
            yield f"{copy} is mapped as well ({copy.found}), and nobody calls it"
        elif copy not in (torch, vllm) and copy.found == "LD_LIBRARY_PATH":
            why = f"torch's is {answer.torch.why}"
            yield f"LD_LIBRARY_PATH leads to {copy}, which is not taken: {why}"
        if len(copy.owners) > 1:
            names = " and ".join(map(str, copy.owners))
            yield f"{copy.path} belongs to {names}: uninstalling one deletes it for the other"
    taken, pinned = (
        torch.version.partition("+")[0] if torch else "",
        answer.pin.partition("==")[2],
    )
    if taken and pinned and release(taken) < release(pinned):
        pinned = f"torch {answer.torch_version} pins {answer.pin}"
        yield f"{pinned}, and {taken} is taken: torch may call what an older NCCL lacks"
