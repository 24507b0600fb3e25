"""Write a job for an existing Ray cluster: `patchkit export ray`."""

from __future__ import annotations

from pathlib import Path

import click

from patchkit.cli.export.options import Exported, exported, put, tell_notes
from patchkit.cli.next_step import next_step
from patchkit.cli.out import as_json, echo, print_json
from patchkit.measure.ray_job import job_text, own_variables, ray_job

_DASHBOARD = "http://127.0.0.1:8265"  # where Ray's head takes jobs by default


@click.command("ray")
@exported(executor="ray")
@as_json
def ray(*, plan: Exported, output: Path | None, force: bool, as_json: bool) -> None:
    """Write a job that serves a model on an existing Ray cluster, as Ray's REST API takes it.

    \b
      patchkit export ray openai/gpt-oss-120b --lock wheelhouse -o job.json
      curl -H 'Content-Type: application/json' -d @job.json \\
        http://127.0.0.1:8265/api/jobs/

    What each node owns, its address above all, a job cannot set: load the node's env file before
    `ray start` there.
    """
    job = ray_job(plan.cluster, plan.ranks, plan.model)
    if as_json:
        print_json(job)
        return
    what = f"{plan.model.name} on {len(plan.ranks)} nodes"
    put(job_text(job), output, force=force, what=what, by="patchkit export ray")
    own = ", ".join(own_variables(plan.ranks))
    tell_notes(plan, f"each node needs its own {own} before `ray start`: `patchkit env`")
    if output:
        words = ("curl", "-H", "Content-Type: application/json", "-d", f"@{output}")
        echo([next_step(*words, f"{_DASHBOARD}/api/jobs/", where="on the head of Ray")])
