"""Show what belongs to a command of serve-args: presets, reasons, notes."""

from __future__ import annotations

from typing import Any

from patchkit.cli.out import style
from patchkit.runtime.rules.presets import load_presets
from patchkit.runtime.serve.args import ServeCommand, ServeFlag
from patchkit.runtime.serve.listen import models_url

HEADS = ("model", "quantization", "GiB", "Sparks", "memory", "tokens", "vLLM", "evidence")


def preset_rows() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for each in load_presets():
        weights = "?" if each.weights_gib is None else f"{each.weights_gib:.0f}"
        share, least = f"{each.gpu_memory_utilization:.2f}", f">={each.min_vllm}"
        rows.append(
            (
                each.id,
                each.quantization,
                weights,
                "1" if each.single else f"{each.nodes}",
                share,
                str(each.max_model_len),
                least + (" (a build)" if each.build else ""),
                f"{each.evidence}, {each.confidence}",
            )
        )
    return rows


def flag_rows(served: ServeCommand) -> list[tuple[str, ...]]:
    return [
        *(_flag_row(style("✓", fg="green"), each) for each in served.flags),
        *(_flag_row(style("-", dim=True), each) for each in served.left_out),
        *(
            (
                style("off", dim=True),
                f"{each.flag} {each.value}",
                f"{each.reason} ({each.id})",
            )
            for each in served.off
        ),
    ]


def _flag_row(mark: str, flag: ServeFlag) -> tuple[str, ...]:
    reason = " ".join(f"{flag.reason} ({flag.origin}; {flag.source})".split())
    return mark, " ".join(flag.words), reason


def command_fields(command: ServeCommand) -> dict[str, Any]:
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
        "memory": command.request.memory,
        "flags": command.flags,
        "left_out": command.left_out,
        "off": command.off,
        "advice": command.advice,
        "notes": command.notes,
    }
