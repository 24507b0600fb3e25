"""Say what is wrong, on which node, why, and what cures it: `patchkit doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from patchkit.cli.cluster.cluster_options import cluster_here
from patchkit.cli.out import FILE_OR_DASH, PATH, table, tell
from patchkit.cli.render import (
    Block,
    ExitCode,
    Record,
    finding_lines,
    rendered,
    verbose_option,
)
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import FILE, ServeChoices, read_cluster_file
from patchkit.doctor.archive import (
    pack_archive,
    require_new,
    save_archive,
    take_out_names,
)
from patchkit.doctor.examination import Examination, examine_cluster, local_facts
from patchkit.doctor.first_use import add_first_use
from patchkit.doctor.symptoms.diagnosis import read_log
from patchkit.doctor.symptoms.findings import log_findings
from patchkit.doctor.symptoms.lines import STDIN, text_chunks
from patchkit.errors import UsageError
from patchkit.extras import BASE, require_libraries
from patchkit.finding import Finding, Level, worst
from patchkit.quoting import quoted
from patchkit.reading import read_chunks
from patchkit.runtime.rules.secret_texts import mask_secrets
from patchkit.wheel.device.installed_code import look_at_device_code

_READER = "patchkit doctor --log -"


@click.command()
@click.option(
    "--cluster", "with_cluster", is_flag=True, help="Every node, and between them."
)
@click.option("--file", type=PATH, help="The cluster's file, instead of cluster.toml.")
@click.option(
    "--log", type=FILE_OR_DASH, help="What a program wrote; - is standard input."
)
@click.option(
    "--port", type=click.IntRange(1, 65535), metavar="N", help="The server's, not 8000."
)
@click.option(
    "--gpu", is_flag=True, help="Also try the GPUs, one by one and together: minutes."
)
@click.option(
    "--save",
    type=PATH,
    help="Keep all of it for a report, without names, addresses and secrets.",
)
@click.option(
    "--venv", metavar="DIR", help="The environment that has vLLM; default: this one."
)
@verbose_option
@rendered
def doctor_command(
    *,
    file: Path | None,
    log: Path | None,
    port: int | None,
    save: Path | None,
    **given: Any,
) -> Iterator[Block]:
    """Find what is wrong, why, and what cures it. Exits with 0 only if nothing is.

    \b
      patchkit doctor
      patchkit doctor --port 8888
      patchkit doctor --cluster
      patchkit doctor --log vllm.log
      docker logs vllm 2>&1 | patchkit doctor --log -
    """
    several = given["with_cluster"] or file is not None
    gpu = given["gpu"]
    verbose = given["verbose"]
    if sum((log is not None, several, port is not None)) > 1:
        raise UsageError(
            "--log, --cluster, --port: one of them", hint="patchkit doctor --cluster"
        )
    if log is None:
        require_libraries(BASE)
    if save is not None:
        require_new(save)
    if log is not None:
        examination = _read_visit(log, given["venv"])
    elif several:
        examination = examine_cluster(
            Cluster(read_cluster_file(file or FILE)), gpu=gpu, here=False
        )
    else:
        choices = {"serve": ServeChoices(port=port)} if port else {}
        cluster = cluster_here(venv=given["venv"], **choices)
        examination = examine_cluster(cluster, gpu=gpu, port=port or 0, here=True)
    examination = add_first_use(examination, look_at_device_code)
    findings = [_masked(finding) for finding in examination.findings]
    yield Record({"findings": [finding.fields() for finding in findings]})
    if log and not verbose:
        yield from (finding.what for finding in findings if finding.level is Level.OK)
    yield from finding_lines(findings, verbose=verbose)
    if save is not None:
        yield from _saved(examination, save, verbose=verbose)
    yield ExitCode(worst(findings, Level.ERROR, Level.WARNING))


def _read_visit(log: Path, venv: str | None) -> Examination:
    """Return what is known of what a program wrote."""
    where = STDIN if str(log) == "-" else str(log)
    pieces = read_chunks(log, reader=_READER, hint=f"docker logs vllm 2>&1 | {_READER}")
    chunks = text_chunks(pieces, where)
    read = read_log(chunks, local_facts(cluster_here(venv=venv)))
    lines = tuple((f"{where}:{number}", text) for number, text in read.lines.items())
    return Examination(findings=tuple(log_findings(read, where)), lines=lines)


def _masked(finding: Finding) -> Finding:
    """Return a finding without secrets: it quotes logs and errors."""
    return replace(
        finding,
        what=mask_secrets(finding.what),
        why=mask_secrets(finding.why),
        hint=mask_secrets(finding.hint),
    )


def _saved(examination: Examination, place: Path, *, verbose: bool) -> Iterator[Block]:
    """Keep a report in an archive, and tell what was taken out of it."""
    parts = examination.report_content()
    logs = {"journal": parts.pop("journal")}
    names = examination.private_names()

    clean = take_out_names(parts, logs, names)
    summary = [
        f"{finding['level']}: {finding['where']}: {finding['what']}"
        for finding in clean.content["findings"]
    ]
    save_archive(pack_archive("report", clean, summary), place)
    tell(f"saved: {place}; taken out: {', '.join(clean.counts) or 'nothing'}")
    if verbose:
        yield from table((name, str(count)) for name, count in clean.counts.items())
    tell(f"look into it before you attach it: {quoted('tar', '-xOzf', place)}")
