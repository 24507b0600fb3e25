"""Check an env file or a script: `patchkit env check`."""

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
from patchkit.errors import SourceError
from patchkit.finding import Finding, Level, worst
from patchkit.reading import read_stdin, read_text
from patchkit.runtime.files.content import SaidVersion
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
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path, allow_dash=True))
@VLLM
@NCCL
@TRITON
@click.option(
    "--topology", metavar="NAME", default="", help="single, roce, socket, ring or hetero."
)
@TARGET
@PYTHON
@click.option(
    "--elsewhere",
    is_flag=True,
    help="The file is for another machine: do not compare it with this one.",
)
@click.option("--host/--no-host", "with_host", default=True, hidden=True)  # the former spelling
@ROOT
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def check(file: Path, *, elsewhere: bool, with_host: bool, as_json: bool, **options: Any) -> None:
    """Find settings in a file that are unknown, obsolete, contradictory or dangerous.

    FILE is any env file or script: sh, systemd, docker, Dockerfile, compose, Python, JSON; - is
    standard input. Nothing in it is run.

    Exits with 3 if there are errors or warnings; notes alone are 0.
    """
    from patchkit.runtime.formats.read import read_content  # `patchkit env` does without these
    from patchkit.runtime.lint.check import check as find
    from patchkit.runtime.lint.situation import situation_of, versions_of

    text, mode = _read(file)
    root, python = options.pop("root"), options.pop("python")
    host = (
        probe(root, python=python, environment=os.environ) if with_host and not elsewhere else None
    )
    content = read_content(text, str(file))
    situation = situation_of(text, content, host, options)
    vllm = situation.get("vllm", "")
    findings = find(
        text,
        str(file),
        situation,
        content=content,
        host=host,
        home=host.vllm_home(vllm) if host else None,
        mode=mode,
    )
    if as_json:
        shown = list(map(_fields, findings))
        said = [asdict(each) for name in _PROJECTS for each in versions_of(content, name)]
        print_json({"file": str(file), "situation": situation, "versions": said, "findings": shown})
    else:
        against = [_against(name, situation, versions_of(content, name)) for name in _PROJECTS]
        if host:
            against.append("this host")
        if not options["target"] and (host is None or target_of(host) != situation["target"]):
            against[-1] += f"; judged for {situation['target']}, --target names another"
        echo(_lines(file, findings, against))
    if code := worst(findings, Level.ERROR, Level.WARNING):
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


def _fields(finding: Finding) -> dict[str, str | int]:
    return {
        "line": finding.line,
        "name": finding.about,
        "severity": finding.level,
        "what": finding.what,
        "why": finding.why,
        "next": finding.hint,
        "source": finding.source,
    }


def _against(project: str, situation: Situation, said: Sequence[SaidVersion]) -> str:
    """Return the version that a file was checked against, and where the file names it."""
    title = _PROJECTS[project]
    version = situation.get(project, "")
    if version and (found := next((each for each in said if each.version == version), None)):
        return f"{title} {version} ({found.text}, line {found.line})"
    if version:
        return f"{title} {version}"
    if len(said) > 1:
        named = " and ".join(f"{each.version} (line {each.line})" for each in said[:2])
        return f"any {title}, since it names {named}: --{project} decides"
    return f"any {title}"


def _lines(file: Path, findings: Sequence[Finding], against: Sequence[str]) -> Iterator[str]:
    for each in findings:
        word = style(each.level, **_STYLES[each.level])
        yield style(f"{file}:{each.line}", bold=True) + "  " + word + f"  {each.what}"
        if each.why:
            source = f" ({each.source})" if each.source else ""
            yield f"  why:  {each.why}{source}"
        if each.hint:
            yield style(f"  next: {each.hint}", dim=True)
    counts = Counter(each.level for each in findings)
    found = ", ".join(
        f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}"
        for level in _STYLES
        if counts[level]
    )
    mark = style("✗", fg="red") if set(counts) - {Level.NOTE} else style("✓", fg="green")
    # What the file was checked against, so that nobody takes silence for more.
    yield mark + f" {file}: {found or 'no problems'}; checked against {', '.join(against)}"
