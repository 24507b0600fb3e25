"""Check names that no release of vLLM or NCCL reads: invented ones, a fork's, a script's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from patchkit.finding import Finding, Level
from patchkit.runtime.files.content import Assignment, FileContent, FileKind, How, short
from patchkit.runtime.lint.upstream import SoftwareOrigin
from patchkit.runtime.rules.condition import Situation
from patchkit.runtime.rules.flags import flags

_LISTED = 5  # names in a note; more are counted there, and named in its reason
_NAMED = 20
# A flag's name without what variables have in its place.
_FORMS = ("--{}", "--enable-{}")
_SWITCHES = ("ENABLE_", "USE_")
# What may start vLLM in its turn: an unknown program, a script, a launcher.
_STARTS_OTHERS = re.compile(r"|.*\.(py|sh)|python.*|ray .*|torchrun|mpirun")


def check_strange(
    strange: Sequence[Assignment], content: FileContent, situation: Situation
) -> Iterator[Finding]:
    """Return a warning for each invented name, and one note for all that somebody else may read.

    A name is invented where upstream's own vLLM gets it, or where it is that of a flag and stands
    beside `vllm serve`. In any other file a fork may read it, or the start script of an image, or
    what reads the file: then it is asked about, and nobody is told to leave it out.
    """
    asked: dict[str, list[Assignment]] = {}
    served = any(each.program == "vllm serve" for each in content.commands)
    origin = SoftwareOrigin(content)
    for each in strange:
        reader = "NCCL" if each.name.startswith("NCCL_") else "vLLM"
        flag = _flag(each.name, situation.get("vllm", ""))
        if not _may_be_vllm(origin, each):
            continue
        # What a list of variables is for, and what an image's own scripts read, it does not say.
        known = content.kind not in (FileKind.ENV, FileKind.DOCKERFILE)
        if known and (origin.is_upstream(each.block) or (flag and served)):
            yield each.warning(
                f"no known {reader} reads {short(each.name)}",
                why=f"{reader} ignores what it does not know.",
                hint=f"use the flag {flag}" if flag else "leave it out",
                source="vLLM envs.py" if reader == "vLLM" else "NCCL's sources",
            )
        else:
            asked.setdefault(reader, []).append(each)
    for reader, together in asked.items():
        yield _question(reader, together, situation.get("vllm", ""))


def _may_be_vllm(origin: SoftwareOrigin, assigned: Assignment) -> bool:
    """Return whether what gets a variable may be vLLM; not if it is known to be something else."""
    commands = origin.commands(assigned.block) if assigned.block else []
    # What stands before a command is for this command alone, in whatever image.
    images = assigned.how is not How.PREFIX
    return not commands or any(
        "vllm" in each.program
        or (images and "vllm" in each.image)
        or (not (images and each.image) and _STARTS_OTHERS.fullmatch(each.program))
        for each in commands
    )


def _flag(name: str, version: str) -> str:
    """Return the flag of `vllm serve` that a variable is named after; empty if there is none."""
    tail = name.removeprefix("VLLM_")
    if tail == name:
        return ""
    for switch in ("", *_SWITCHES):
        for form in _FORMS:
            flag = form.format(tail.removeprefix(switch).lower().replace("_", "-"))
            if flag in flags(version):
                return flag
    return ""


def _question(reader: str, together: Sequence[Assignment], version: str) -> Finding:
    names = list(dict.fromkeys(each.name for each in together))
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    rest = [*map(short, names[_LISTED:_NAMED]), *(["…"] if len(names) > _NAMED else [])]
    others = f" The others: {', '.join(rest)}." if rest else ""
    named = [(name, flag) for name in names[:_LISTED] if (flag := _flag(name, version))]
    also = "".join(f"; {name} is the flag {flag}" for name, flag in named)
    them, they = ("them", "they have") if names[1:] else ("it", "it has")
    return Finding(
        line=together[0].line,
        about=names[0],
        level=Level.NOTE,
        what=f"no known {reader} reads {', '.join(map(short, names[:_LISTED]))}{more}",
        why="A fork may, or a script or compose file of yours; upstream's releases read none."
        + others,
        hint=f"of a fork or a script? Then keep {them}; to upstream {they} no effect{also}",
        source="vLLM envs.py" if reader == "vLLM" else "NCCL's sources",
    )
