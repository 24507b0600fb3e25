"""Show what belongs to a command of serve-args: presets, reasons, notes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from patchkit.cli.next_step import next_step
from patchkit.cli.out import say, style
from patchkit.runtime.rules.presets import load_presets
from patchkit.runtime.serve.args import ServeCommand, ServeFlag
from patchkit.runtime.serve.listen import models_url

NOTE = style("note", fg="yellow")


HEADS = ("model", "quantization", "GiB", "Sparks", "memory", "tokens", "vLLM", "evidence")


def listing() -> list[tuple[str, ...]]:
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


def preset_fields() -> list[dict[str, Any]]:
    """Return what `--list --json` prints: the presets as presets.toml has them."""
    return [{**asdict(each), "name": each.name} for each in load_presets()]


def explained(served: ServeCommand) -> list[tuple[str, ...]]:
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
        "memory": asdict(command.request.memory),
        "flags": [asdict(flag) for flag in command.flags],
        "left_out": [asdict(flag) for flag in command.left_out],
        "off": [asdict(rule) for rule in command.off],
        "advice": [asdict(advice) for advice in command.advice],
        "notes": command.notes,
    }


def tell(served: ServeCommand) -> None:
    """Print on standard error, so that the command alone is on standard output."""
    for note in served.notes:
        say(NOTE + f" {note}", err=True)
    for each in served.advice:
        say(style("beware", fg="yellow") + f" {each.says}: {each.instead}", err=True)
    if url := models_url(served.request):
        say(next_step("curl", url, where="once it serves"), err=True)
