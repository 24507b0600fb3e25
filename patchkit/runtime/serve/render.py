"""How the flags are shown: a line or a script for sh, fields for programs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from patchkit.runtime.serve.args import Flag, Served


def line(served: Served) -> str:
    """The whole command as one line that sh reads back word by word."""
    return shlex.join(served.command)


def lines(served: Served) -> str:
    """A script for sh, one flag per line below its reason.

    ``set --`` collects the words: a comment cannot stand between lines that a backslash joins, and
    arrays are not in sh.
    """
    return "\n".join(_lines(served))


def _lines(served: Served) -> Iterator[str]:
    request = served.request
    where = "" if request.role == "single" else f" of {request.nodes}, {request.topology}"
    yield f"# For vLLM {request.vllm}: {request.role}{where}."
    yield f"set -- {shlex.join(served.command[:3])}"
    for flag in served.flags:
        yield f"# {reason(flag)}"
        yield f'set -- "$@" {shlex.join(flag.words)}'
    yield '"$@"'


def reason(flag: Flag) -> str:
    """On one line, whatever the data has."""
    return " ".join(f"{flag.reason} ({flag.origin}; {flag.source})".split())


def fields(served: Served) -> dict[str, Any]:
    """For programs."""
    request = served.request
    preset = request.preset
    return {
        "command": served.command,
        "vllm": request.vllm,
        "role": request.role,
        "topology": request.topology,
        "executor": request.executor,
        "nodes": request.nodes,
        "preset": preset.id if preset else None,
        "variables": dict(preset.variables) if preset else {},
        "flags": [asdict(flag) for flag in served.flags],
        "left_out": [asdict(flag) for flag in served.left_out],
        "off": [asdict(rule) for rule in served.off],
        "advice": [asdict(each) for each in served.advice],
        "notes": served.notes,
    }
