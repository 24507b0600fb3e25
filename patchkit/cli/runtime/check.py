"""Check env files, launch scripts and running servers: `patchkit check`, `patchkit env check`."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from patchkit.cli.out import echo, print_json, style
from patchkit.cli.runtime.node_options import NCCL, PYTHON, ROOT, TARGET, TRITON, VLLM
from patchkit.errors import SourceError, UsageError
from patchkit.finding import Finding, Level, worst
from patchkit.reading import read_stdin, read_text
from patchkit.runtime.check.versions import StatedVersion
from patchkit.runtime.host.probe import probe
from patchkit.runtime.host.target import target_of
from patchkit.runtime.rules.condition import Situation

# The time of a check grows with the lines: a limit beside that of bytes.
_MOST_LINES = 250_000
_PROJECTS = {"vllm": "vLLM", "nccl": "NCCL"}
_STYLES: Mapping[Level, Mapping[str, Any]] = {
    Level.ERROR: {"fg": "red", "bold": True},
    Level.WARNING: {"fg": "yellow"},
    Level.NOTE: {"dim": True},
}


@click.command()
@click.argument(
    "files", metavar="FILE...", nargs=-1, type=click.Path(path_type=Path, allow_dash=True)
)
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
@click.option("--topology", metavar="NAME", default="", help="single, roce, socket, ring, hetero.")
@TARGET
@PYTHON
@click.option("--elsewhere", is_flag=True, help="Do not compare the files with this machine.")
@click.option("--host/--no-host", "with_host", default=True, hidden=True)  # the former spelling
@ROOT
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def command(
    files: tuple[Path, ...],
    *,
    running: str | None,
    elsewhere: bool,
    with_host: bool,
    root: Path,
    python: str | None,
    as_json: bool,
    **options: str,
) -> None:
    """Find settings that are unknown, obsolete, contradictory or dangerous.

    FILE is an env file, a shell script, a compose file, a Kubernetes manifest, a Dockerfile or a
    systemd unit; - is standard input. What stands there literally is judged, nothing is run.
    `# patchkit: ignore ID` on a line, or above it, silences a finding.

    Exits with 3 if there are errors or warnings; notes alone are 0.
    """
    from patchkit.runtime.check.check import CheckedText, find_problems  # `env` does without
    from patchkit.runtime.check.formats import read_content
    from patchkit.runtime.check.running import RunningServer, find_running
    from patchkit.runtime.check.situation import find_situation
    from patchkit.runtime.check.versions import find_versions

    if not files and running is None:
        raise UsageError("no file", hint="name files, or what runs: patchkit check --running")
    servers = find_running(running, root) if running is not None else []
    texts = {str(file): _read(file) for file in files}
    read = [RunningServer(where, read_content(text, where)) for where, (text, _) in texts.items()]
    results = []
    for server in [*read, *servers]:
        text, mode = texts.get(server.where, ("", None))
        interpreter = python or server.python or None
        host = None
        if with_host and not elsewhere:
            host = probe(root, python=interpreter, environment=os.environ)
        versions = find_versions(text, server.content)
        situation = find_situation(text, server.content, versions, host, options)
        checked = CheckedText(
            text=text,
            where=server.where,
            content=server.content,
            situation=situation,
            versions=versions,
            host=host,
            home=host.vllm_home(situation.get("vllm", "")) if host else None,
            mode=mode,
        )
        findings = find_problems(checked)
        against = [_describe_version(name, situation, versions) for name in _PROJECTS]
        against += ["this host"] if host else []
        if not options["target"] and (host is None or target_of(host) != situation["target"]):
            against[-1] += f"; judged for {situation['target']}, --target names another"
        results.append((checked, findings, against))
    if as_json:
        print_json({"files": [_as_json(checked, findings) for checked, findings, _ in results]})
    else:
        for checked, findings, against in results:
            echo(_lines(checked.where, findings, against))
    found = [finding for _, findings, _ in results for finding in findings]
    if code := worst(found, Level.ERROR, Level.WARNING):
        raise SystemExit(code)


def _read(file: Path) -> tuple[str, int | None]:
    """Return the text and the mode of a file.

    Raises UsageError for what is not a file, SourceError for what is not a text or has too many
    lines for one that sets variables, StorageError if it cannot be read.
    """
    stdin = str(file) == "-"
    text = read_stdin() if stdin else read_text(file, hint="name an env file or a script")
    if text.count("\n") > _MOST_LINES:
        raise SourceError(
            f"{file}: has more than {_MOST_LINES:,} lines",
            why="no env file or script is that long",
            hint="name the file that was meant",
        )
    return text, None if stdin else stat.S_IMODE(file.stat().st_mode)


def _as_json(checked: Any, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "file": checked.where,
        "situation": checked.situation,
        "versions": [asdict(stated) for stated in checked.versions],
        "findings": [
            {
                "id": finding.id,
                "line": finding.line,
                "name": finding.about,
                "severity": finding.level,
                "what": finding.what,
                "why": finding.why,
                "next": finding.hint,
                "source": finding.source,
            }
            for finding in findings
        ],
    }


def _describe_version(project: str, situation: Situation, versions: Sequence[StatedVersion]) -> str:
    """Return the version that a file was checked against, and where the file names it."""
    title, version = _PROJECTS[project], situation.get(project, "")
    stated = [found for found in versions if found.project == project]
    for found in stated:
        if version and found.version == version:
            return f"{title} {version} ({found.text}, line {found.line})"
    if version:
        return f"{title} {version}"
    if len(stated) > 1:
        names = " and ".join(f"{found.version} (line {found.line})" for found in stated[:2])
        return f"any {title}, since it names {names}: --{project} decides"
    return f"any {title}"


def _lines(where: str, findings: Sequence[Finding], against: Sequence[str]) -> Iterator[str]:
    for finding in findings:
        place = where if where.startswith(("process ", "container ")) else f"{where}:{finding.line}"
        word = style(finding.level, **_STYLES[finding.level])
        yield style(place, bold=True) + "  " + word + f"  {finding.what}  [{finding.id}]"
        if finding.why:
            source = f" ({finding.source})" if finding.source else ""
            yield f"  why:  {finding.why}{source}"
        if finding.hint:
            yield style(f"  next: {finding.hint}", dim=True)
    counts = Counter(finding.level for finding in findings)
    found = ", ".join(
        f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}"
        for level in _STYLES
        if counts[level]
    )
    mark = style("✗", fg="red") if set(counts) - {Level.NOTE} else style("✓", fg="green")
    # What the file was checked against, so that nobody takes silence for more.
    yield mark + f" {where}: {found or 'no problems'}; checked against {', '.join(against)}"
