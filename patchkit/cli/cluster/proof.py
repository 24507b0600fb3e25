"""Try the GPU, vLLM and NCCL of an owner's machines: `patchkit proof`."""

from __future__ import annotations

from pathlib import Path

import click

from patchkit.cli.cluster.cluster_options import (
    OTHER_FILE_OPTION,
    VENV_OPTION,
    cluster_here,
)
from patchkit.cli.out import PATH, LaidOut, next_step, tell
from patchkit.cli.render import Blocks, ExitCode, Record, flag, option, rendered
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import FILE, read_cluster_file
from patchkit.doctor.archive import require_new, save_archive
from patchkit.doctor.proof import collect_proof
from patchkit.doctor.proof_record import summary_lines
from patchkit.errors import HostError, ProofError
from patchkit.extras import BASE, require_libraries
from patchkit.wheel.device.installed_code import look_at_device_code


@click.command
@click.argument("args", nargs=-1)
@option("-o FILE", "place", "The archive: .tar.gz.", type=PATH, required=True)
@flag("--cluster", "several", "Also NCCL between the nodes.")
@OTHER_FILE_OPTION
@VENV_OPTION
@option("--model NAME", "Serve it instead of random weights.", default="")
@rendered
def proof_command(
    *,
    args: tuple[str, ...],
    place: Path,
    several: bool,
    file: Path | None,
    venv: str | None,
    model: str,
) -> Blocks:
    """Try kernels, routing, NCCL and a server here; keep the results, without names.

    It takes some 15 minutes and the GPU for itself; nothing is sent anywhere. Words behind `--` are
    added to `vllm serve`. The exit code is 9 without a GPU, 5 if a part failed. After Ctrl-C the
    results so far are kept.

    \b
      patchkit proof -o gb10.tar.gz
      patchkit proof -o gb10.tar.gz --cluster
    """
    require_libraries(BASE)
    require_new(place)

    cluster = cluster_here(venv)
    if several or file:
        cluster = Cluster(read_cluster_file(file or FILE))

    random = "random weights, 4.6 GiB of memory; nothing is downloaded"
    tell(f"serves {model or random}")
    proof, archive, interrupt = collect_proof(
        cluster, model, args, tell, look_at_device_code
    )
    save_archive(archive, place)

    summary = summary_lines(proof)
    yield Record(
        {
            "archive": place,
            "summary": summary,
            "parts": proof.parts,
        }
    )
    yield from map(LaidOut, summary)

    yield f"{place}: {len(archive) / 1e3:.0f} kB; look into it before you hand it on"
    yield next_step("tar", "-xOzf", place, "proof.json")

    if interrupt is not None:
        raise interrupt

    if proof.part("gpu-device").state != "ok":
        yield ExitCode(HostError.exit_code)
    elif any(part.state == "failed" for part in proof.parts):
        yield ExitCode(ProofError.exit_code)
