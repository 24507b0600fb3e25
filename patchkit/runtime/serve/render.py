"""Show a command: a line or a script for sh, fields for programs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from patchkit.runtime.serve.args import ServeCommand, ServeFlag
from patchkit.runtime.serve.listen import models_url


def line(command: ServeCommand) -> str:
    """Return the whole command as one line that sh reads back word by word."""
    return shlex.join(command.words)


def lines(command: ServeCommand) -> str:
    """Return a script for sh, one flag per line below its reason.

    ``set --`` collects the words: a comment cannot stand between lines that a backslash joins, and
    arrays are not in sh.
    """
    return "\n".join(_lines(command))


def _lines(command: ServeCommand) -> Iterator[str]:
    node = command.request.node
    where = "" if node.role == "single" else f" of {node.nodes}, {node.topology}"
    yield f"# For vLLM {node.vllm}: {node.role}{where}."
    yield f"set -- {shlex.join(command.words[:3])}"
    for flag in command.flags:
        yield f"# {reason(flag)}"
        yield f'set -- "$@" {shlex.join(flag.words)}'
    yield '"$@"'


def reason(flag: ServeFlag) -> str:
    """Return a flag's reason on one line, whatever the data has."""
    return " ".join(f"{flag.reason} ({flag.origin}; {flag.source})".split())


def fields(command: ServeCommand) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    node = command.request.node
    preset = node.preset
    return {
        "command": command.words,
        "vllm": node.vllm,
        "role": node.role,
        "topology": node.topology,
        "executor": node.executor.name,
        "nodes": node.nodes,
        "preset": preset.id if preset else None,
        "variables": dict(preset.variables) if preset else {},
        "url": models_url(command.request),
        "memory": asdict(command.request.memory),
        "flags": [asdict(flag) for flag in command.flags],
        "left_out": [asdict(flag) for flag in command.left_out],
        "off": [asdict(rule) for rule in command.off],
        "advice": [asdict(each) for each in command.advice],
        "notes": command.notes,
    }
