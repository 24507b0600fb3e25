"""Find faults of machines, servers and logs, and prove that a machine works: `doctor`, `proof`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from patchkit.cli.cluster.cluster_options import (
    cluster_here,
)
from patchkit.cli.out import LaidOut, next_step, table, tell
from patchkit.cli.render import (
    Blocks,
    ExitCode,
    finding_lines,
    options_of,
    rendered,
)
from patchkit.cluster.launch.cluster import read_cluster_file
from patchkit.cluster.launch.cluster_file import FILE, ServeChoices
from patchkit.doctor.answer_check import check_answers
from patchkit.doctor.archive import (
    pack_archive,
    require_new,
    save_archive,
    take_out_names,
)
from patchkit.doctor.boot import examine_boot
from patchkit.doctor.examination import Examination, examine_cluster, local_facts
from patchkit.doctor.first_use import add_first_use
from patchkit.doctor.private_names import private_names
from patchkit.doctor.proof import collect_proof
from patchkit.doctor.proof_record import summary_lines
from patchkit.doctor.symptoms.diagnosis import read_log
from patchkit.doctor.symptoms.findings import is_answer, log_findings
from patchkit.doctor.symptoms.lines import STDIN, text_chunks
from patchkit.errors import HostError, ProofError, UsageError
from patchkit.extras import BASE, require_libraries
from patchkit.finding import Level, worst
from patchkit.quoting import quoted
from patchkit.reading import read_chunks
from patchkit.runtime.rules.secret_texts import mask_secrets

_READER = "patchkit doctor --log -"


@click.command
@options_of("doctor")
@rendered
def doctor_command(
    log: Path | None,
    save: Path | None,
    verbose: bool,
    **options: Any,
) -> Blocks:
    """Find what is wrong, why, and what cures it. Exits with 0 only if nothing is.

    \b
      patchkit doctor
      patchkit doctor --port 8888
      patchkit doctor --answers
      patchkit doctor --cluster
      patchkit doctor --cluster --boot -1
      patchkit doctor --log vllm.log
      docker logs vllm 2>&1 | patchkit doctor --log -
    """
    is_several = options["with_cluster"] or options["file"] is not None
    subjects = (log is not None, is_several, options["port"] is not None)
    if sum(subjects) > 1:
        hint = "patchkit doctor --cluster"
        raise UsageError("--log, --cluster, --port: one of them", hint=hint)

    if log is None:
        require_libraries(BASE)
    if save is not None:
        require_new(save)

    examination = add_first_use(_examine(log=log, **options))
    findings = [
        replace(  # these texts quote logs and errors
            finding,
            what=mask_secrets(finding.what),
            why=mask_secrets(finding.why),
            hint=mask_secrets(finding.hint),
        )
        for finding in examination.findings
    ]
    yield {"findings": findings}

    answers = filter(is_answer, findings if log else ())
    yield from finding_lines(findings, *answers, verbose=verbose)

    if save is not None:
        yield from _save_report(examination, save, verbose=verbose)
    yield ExitCode(worst(findings, Level.ERROR, Level.WARNING))


def _examine(
    *,
    log: Path | None,
    file: Path | None,
    port: int | None,
    venv: str | None,
    gpu: bool,
    answers: bool,
    accept: bool,
    with_cluster: bool,
    boot: int | None,
) -> Examination:
    """Look at a log, at a cluster, at this machine, or at the end of a boot."""
    if log is not None:
        return _examine_log(log, venv)

    is_local = not with_cluster and file is None
    if is_local:
        choices = {"serve": ServeChoices(port=port)} if port else {}
        cluster = cluster_here(venv, **choices)
    else:
        cluster = read_cluster_file(file or FILE)

    if boot:
        return examine_boot(cluster, boot)
    examination = examine_cluster(
        cluster,
        gpu=gpu,
        port=port or 0,
        is_local=is_local,
    )
    # Add what the model's answers show, if the user wants to know it.
    if not answers and not accept:
        return examination
    findings = check_answers(cluster, port=port or 0, accept=accept)
    return replace(examination, findings=(*findings, *examination.findings))


def _examine_log(log: Path, venv: str | None) -> Examination:
    """Return the findings in the output of a program."""
    where = STDIN if str(log) == "-" else str(log)
    pieces = read_chunks(log, reader=_READER, hint=f"docker logs vllm 2>&1 | {_READER}")
    chunks = text_chunks(pieces, where)
    read = read_log(chunks, local_facts(cluster_here(venv)))
    lines = [(f"{where}:{number}", text) for number, text in read.lines.items()]
    return Examination(findings=tuple(log_findings(read, where)), lines=tuple(lines))


def _save_report(examination: Examination, place: Path, *, verbose: bool) -> Blocks:
    """Save a report in an archive, and tell which kinds of names were replaced in it."""
    parts = examination.report_content()
    logs = {"journal": parts.pop("journal")}
    names = private_names(examination.reports)

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


@click.command
@options_of("proof")
@rendered
def proof_command(
    place: Path,
    several: bool,
    file: Path | None,
    venv: str | None,
) -> Blocks:
    """Try kernels, routing and NCCL here; keep the results, without names.

    It takes some 10 minutes and the GPU for itself; nothing is sent anywhere. The exit code is 9
    without a GPU, 5 if a part failed. After Ctrl-C the results so far are kept.

    \b
      patchkit proof -o gb10.tar.gz
      patchkit proof -o gb10.tar.gz --cluster
    """
    require_libraries(BASE)
    require_new(place)

    cluster = cluster_here(venv)
    if several or file:
        cluster = read_cluster_file(file or FILE)

    proof, archive, interrupt = collect_proof(cluster, tell)
    save_archive(archive, place)

    summary = summary_lines(proof)
    yield {
        "archive": place,
        "summary": summary,
        "parts": proof.parts,
    }
    yield from map(LaidOut, summary)

    yield f"{place}: {len(archive) / 1e3:.0f} kB; look into it before you hand it on"
    yield next_step("tar", "-xOzf", place, "proof.json")

    if interrupt is not None:
        raise interrupt

    if proof.parts[0].state != "ok":  # the device itself
        yield ExitCode(HostError.exit_code)
    elif any(part.state == "failed" for part in proof.parts):
        yield ExitCode(ProofError.exit_code)
