"""Check env files, launch scripts and running servers: `patchkit check`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from patchkit.cli.out import FILE_OR_DASH, style
from patchkit.cli.render import (
    BAD,
    GOOD,
    MARKS,
    Block,
    ExitCode,
    Record,
    counted_noun,
    rendered,
)
from patchkit.cli.runtime.node_options import NCCL, PYTHON, ROOT, TARGET, TRITON, VLLM
from patchkit.errors import UsageError
from patchkit.finding import Finding, Level, worst
from patchkit.runtime.host.probe import probe

if TYPE_CHECKING:
    from patchkit.runtime.check.content import CheckedText

_PROJECTS = {"vllm": "vLLM", "nccl": "NCCL"}
_COUNTED = (Level.ERROR, Level.WARNING, Level.NOTE)


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, type=FILE_OR_DASH)
@click.option(
    "--running",
    metavar="[PID|CONTAINER]",
    is_flag=False,
    flag_value="",
    help="Check what runs: a process or a container; alone all servers of this user.",
)
@VLLM
@NCCL
@TRITON
@click.option(
    "--topology", metavar="NAME", default="", help="single, roce, socket, ring, hetero."
)
@TARGET
@PYTHON
@click.option(
    "--elsewhere", is_flag=True, help="Do not compare the files with this machine."
)
@ROOT
@rendered
def check_command(
    files: tuple[Path, ...],
    *,
    running: str | None,
    root: Path,
    python: str | None,
    **options: Any,
) -> Iterator[Block]:
    """Find settings that are unknown, obsolete, contradictory or dangerous.

    FILE is an env file, a shell script, a compose file, a Kubernetes manifest, a Dockerfile or a
    systemd unit; - is standard input. What stands there literally is judged, nothing is run.
    `# patchkit: ignore ID` on a line, or above it, silences a finding.

    Exits with 3 if there are errors or warnings; notes alone are 0.
    """
    from patchkit.runtime.check.check import find_problems  # `env` does without these
    from patchkit.runtime.check.formats import read_file
    from patchkit.runtime.check.running import find_running
    from patchkit.runtime.check.situation import add_situation

    if not files and running is None:
        raise UsageError(
            "no file", hint="name files, or what runs: patchkit check --running"
        )
    found = [*map(read_file, files)]
    found += [] if running is None else find_running(running, root)
    host = (
        None
        if options.pop("elsewhere")
        else probe(root, python=python, environment=os.environ)
    )
    checked = [add_situation(subject, host, options) for subject in found]
    findings = [find_problems(subject) for subject in checked]
    rows = []
    for it, problems in zip(checked, findings, strict=True):
        known = {"file": it.where, "situation": it.situation, "versions": it.versions}
        rows.append({**known, "findings": problems})
        yield from _problem_lines(it, problems, is_asked=bool(options["target"]))
    yield Record({"files": rows})
    yield ExitCode(worst(chain.from_iterable(findings), Level.ERROR, Level.WARNING))


def _problem_lines(
    checked: CheckedText, findings: Sequence[Finding], *, is_asked: bool
) -> Iterator[str]:
    for finding in findings:
        place = f"{checked.where}:{finding.line}" if checked.text else checked.where
        level = style(finding.level, **MARKS[finding.level][1])
        yield (
            style(place, bold=True) + "  " + level + f"  {finding.what}  [{finding.id}]"
        )
        if finding.why:
            source = f" ({finding.source})" if finding.source else ""
            yield f"  why:  {finding.why}{source}"
        if finding.hint:
            yield style(f"  next: {finding.hint}", dim=True)
    counts = Counter(finding.level for finding in findings)
    parts = [counted_noun(counts[level], level) for level in _COUNTED if counts[level]]
    mark = BAD if set(counts) - {Level.NOTE} else GOOD
    # What the file was checked against, so that nobody takes silence for more.
    against = []
    for name, title in _PROJECTS.items():
        version = checked.situation.get(name, "")
        stated = [it for it in checked.versions if it.project == name]
        named = [
            f" ({it.text}, line {it.line})" for it in stated if it.version == version
        ]
        several = f", since it names several: --{name} decides" if stated[1:] else ""
        known = f"{title} {version}{''.join(named[:1])}"
        against.append(known if version else f"any {title}{several}")
    against += ["this host"] if checked.host else []
    target = checked.situation["target"]
    if not is_asked and (checked.host is None or checked.host.target != target):
        against[-1] += f"; judged for {target}, --target names another"
    result = ", ".join(parts) or "no problems"
    yield mark + f"{checked.where}: {result}; checked against {', '.join(against)}"
