"""patchkit env check"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from patchkit.cli.out import echo, print_json, style
from patchkit.errors import SourceError
from patchkit.finding import Finding, Level, worst
from patchkit.reading import read_stdin, read_text
from patchkit.runtime.env.cluster import target_of
from patchkit.runtime.envfile.facts import fact_problems
from patchkit.runtime.envfile.header import head_facts
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.probe import probe
from patchkit.runtime.rules.releases import release
from patchkit.runtime.rules.variables import vllm_variables
from patchkit.target import targets

_MOST_LINES = 250_000
_FACTS = ("role", "topology", "executor", "vllm", "nccl", "nodes", "quantization")
_STYLES: Mapping[Level, Mapping[str, Any]] = {
    Level.ERROR: {"fg": "red", "bold": True},
    Level.WARNING: {"fg": "yellow"},
    Level.NOTE: {"dim": True},
}


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--vllm", metavar="VERSION", default="", help="Instead of the installed one.")
@click.option("--nccl", metavar="VERSION", default="", help="Instead of the one that torch loads.")
@click.option("--triton", metavar="VERSION", default="", help="Instead of the installed one.")
@click.option(
    "--topology", metavar="NAME", default="", help="single, roce, socket, ring or hetero."
)
@click.option("--target", type=click.Choice(list(targets())), help="Instead of the probed GPU.")
@click.option("--python", metavar="PATH", help="The Python of vLLM; default: the present one.")
@click.option(
    "--host/--no-host",
    "with_host",
    default=True,
    help="Whether this host must have what the file names.  [default: host]",
)
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path("/"),
    help="Probe this root, such as `patchkit probe --save` writes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def check(file: Path, *, with_host: bool, as_json: bool, **options: Any) -> None:
    """Settings in a file that are unknown, obsolete, contradictory or dangerous.

    FILE is any env file or script: sh, systemd, docker, Dockerfile, compose, Python, JSON; - is
    standard input. Nothing in it is run.

    Exits with 3 if there are errors or warnings; notes alone are 0.
    """
    from patchkit.runtime.lint.check import check as find  # `patchkit env` does without it

    text, mode = _read(file)
    host = _host(options) if with_host else None
    situation = _situation(options, head_facts(text), host)
    findings = find(
        text,
        str(file),
        situation,
        known=_known(situation, host),
        host=host,
        home=host.vllm_home(situation.get("vllm", "")) if host else None,
        mode=mode,
    )
    if as_json:
        fields = [_fields(each) for each in findings]
        print_json({"file": str(file), "situation": situation, "findings": fields})
    else:
        echo(_lines(file, situation, findings, host))
    if code := worst(findings, Level.ERROR, Level.WARNING):
        raise SystemExit(code)


def _read(file: Path) -> tuple[str, int | None]:
    """Return the text and the mode of a file.

    Raises UsageError for what is no file, SourceError for what is no text or too large for one that
    sets variables, StorageError if it cannot be read.
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


def _host(options: Mapping[str, Any]) -> Host:
    return probe(options["root"], python=options["python"], environment=os.environ)


def _situation(
    options: Mapping[str, Any], facts: Mapping[str, str], host: Host | None
) -> dict[str, str]:
    """What is known: asked for, else said by the file, else found on this host.

    Raises UsageError for a version that is none.
    """
    for name in ("vllm", "nccl", "triton"):
        if options[name]:
            release(options[name])
    found = _of_host(host) if host else {}
    wrong = fact_problems(facts)  # reported as findings
    said = {name: facts[name] for name in _FACTS if name in facts and name not in wrong}
    asked = {name: str(value) for name, value in options.items() if name in _ASKED and value}
    return {name: value for name, value in {**found, **said, **asked}.items() if value}


_ASKED = ("vllm", "nccl", "triton", "topology", "target")


def _of_host(host: Host) -> dict[str, str]:
    topology = "roce" if any(each.active for each in host.rdma) else ""
    return {"target": target_of(host), "topology": topology, **host.versions}


def _known(situation: Mapping[str, str], host: Host | None) -> Mapping[str, str]:
    """The names of the installed vLLM, if it is the one in question, else those in the tables."""
    version = situation.get("vllm", "")
    return vllm_variables(version, host.vllm_home(version) if host else None)


def _lines(
    file: Path, situation: Mapping[str, str], findings: Sequence[Finding], host: Host | None
) -> Iterator[str]:
    for each in findings:
        word = style(each.level, **_STYLES[each.level])
        yield style(f"{file}:{each.line}", bold=True) + "  " + word + f"  {each.what}"
        if each.why:
            source = f" ({each.source})" if each.source else ""
            yield f"  why:  {each.why}{source}"
        if each.hint:
            yield style(f"  next: {each.hint}", dim=True)
    counts = Counter(each.level for each in findings)
    told = ", ".join(_counted(kind, counts[kind]) for kind in Level if counts[kind])
    wrong = set(counts) - {Level.NOTE}
    mark = style("✗", fg="red") if wrong else style("✓", fg="green")
    yield mark + f" {file}: {told or 'nothing speaks against it'}; {_against(situation, host)}"


def _fields(found: Finding) -> dict[str, str | int]:
    return {
        "line": found.line,
        "name": found.about,
        "severity": found.level,
        "what": found.what,
        "why": found.why,
        "next": found.hint,
        "source": found.source,
    }


def _counted(kind: Level, count: int) -> str:
    return f"{count} {kind}{'' if count == 1 else 's'}"


def _against(situation: Mapping[str, str], host: Host | None) -> str:
    """What the file was held against, so that nobody takes silence for more."""
    vllm = f"vLLM {situation['vllm']}" if situation.get("vllm") else "any vLLM"
    nccl = f"NCCL {situation['nccl']}" if situation.get("nccl") else "any NCCL"
    return f"held against {vllm}, {nccl}{', this host' if host else ''}"
