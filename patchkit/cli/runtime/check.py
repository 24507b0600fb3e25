"""Check env files, launch scripts and running servers: `patchkit check`."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from patchkit.cli.out import bold, dim, style
from patchkit.cli.render import (
    BAD,
    GOOD,
    MARKS,
    Blocks,
    ExitCode,
    Lines,
    counted_noun,
    options_of,
    rendered,
)
from patchkit.errors import UsageError
from patchkit.finding import Finding, Level, worst
from patchkit.runtime.check.check import find_problems
from patchkit.runtime.check.content import CheckedText
from patchkit.runtime.check.formats import read_file
from patchkit.runtime.check.running import find_running
from patchkit.runtime.check.situation import add_situation
from patchkit.runtime.host.probe import probe

_PROJECTS = {"vllm": "vLLM", "nccl": "NCCL"}


@click.command
@options_of("check")
@rendered
def check_command(
    files: tuple[Path, ...],
    running: str | None,
    root: Path,
    python: str | None,
    **options: Any,
) -> Blocks:
    """Find settings that are unknown, obsolete, contradictory or dangerous.

    FILE is an env file, a shell script, a compose file, a Kubernetes manifest, a Dockerfile or a
    systemd unit; - is standard input. Only literal values are checked; nothing is executed.
    `# patchkit: ignore ID` on a line, or above it, silences a finding.

    Exits with 3 if there are errors or warnings; notes alone are 0.
    """
    if not files and running is None:
        hint = "name files, or what runs: patchkit check --running"
        raise UsageError("no file", hint=hint)

    subjects = list(map(read_file, files))
    if running is not None:
        subjects += find_running(running, root)

    host = None
    if not options.pop("elsewhere"):
        host = probe(root, python=python)

    rows = []
    findings: list[Finding] = []
    for subject in subjects:
        checked = add_situation(subject, host, options)
        problems = find_problems(checked)
        findings += problems
        rows.append(
            {
                "file": checked.where,
                "situation": checked.situation,
                "versions": checked.versions,
                "findings": problems,
            }
        )
        for problem in problems:
            yield from _problem_lines(checked, problem)
        yield _summary(checked, problems, is_target_given=bool(options["target"]))

    yield {"files": rows}
    yield ExitCode(worst(findings, Level.ERROR, Level.WARNING))


def _problem_lines(checked: CheckedText, problem: Finding) -> Lines:
    place = checked.where
    if checked.text:
        place += f":{problem.line}"
    level = style(problem.level, **MARKS[problem.level][1])
    head = bold(place) + "  " + level
    yield head + f"  {problem.what}  [{problem.id}]"

    if problem.why:
        source = f" ({problem.source})" if problem.source else ""
        yield f"  why:  {problem.why}{source}"
    if problem.hint:
        yield dim(f"  next: {problem.hint}")


def _summary(
    checked: CheckedText, problems: Sequence[Finding], *, is_target_given: bool
) -> str:
    """Return the number of problems in a file, and the facts that it was checked against."""
    counts = Counter(problem.level for problem in problems)
    parts = [counted_noun(counts[level], level) for level in Level if counts[level]]
    result = ", ".join(parts) or "no problems"
    is_bad = counts.keys() - {Level.NOTE}

    facts = [_version_text(checked, project) for project in _PROJECTS]

    host_target = ""
    if checked.host:
        facts.append("this host")
        host_target = checked.host.target

    target = checked.situation["target"]
    if not is_target_given and target != host_target:
        facts[-1] += f"; judged for {target}, --target names another"

    sign = BAD if is_bad else GOOD
    return sign + f"{checked.where}: {result}; checked against {', '.join(facts)}"


def _version_text(checked: CheckedText, project: str) -> str:
    """Return the version of a project, and the line of the file that names it."""
    title = _PROJECTS[project]
    named = [row for row in checked.versions if row.project == project]
    version = checked.situation.get(project, "")
    if not version:
        hint = ""
        if len(named) > 1:
            hint = f", since it names several: --{project} decides"
        return f"any {title}{hint}"

    for row in named:
        if row.version == version:
            return f"{title} {version} ({row.text}, line {row.line})"
    return f"{title} {version}"
