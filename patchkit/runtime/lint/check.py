"""Check env files and scripts: names, values, contradictions, this host, secrets and servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from patchkit.finding import Finding, Level
from patchkit.runtime.envfile.header import head_facts
from patchkit.runtime.files.content import FileContent
from patchkit.runtime.formats.read import read_content
from patchkit.runtime.host.host import Host
from patchkit.runtime.lint.choices import check_choice
from patchkit.runtime.lint.cluster import check_advice, check_ray, in_cluster
from patchkit.runtime.lint.containers import check_containers
from patchkit.runtime.lint.contradictions import check_contradictions
from patchkit.runtime.lint.flags import check_flags
from patchkit.runtime.lint.header import check_header
from patchkit.runtime.lint.host import check_host
from patchkit.runtime.lint.limits import check_limits
from patchkit.runtime.lint.names import KnownNames, check_names
from patchkit.runtime.lint.placeholders import check_placeholders
from patchkit.runtime.lint.reading import check_reading
from patchkit.runtime.lint.secrets import check_secrets
from patchkit.runtime.lint.servers import check_servers
from patchkit.runtime.lint.upstream import SoftwareOrigin
from patchkit.runtime.lint.values import check_link_local, check_products, check_value
from patchkit.runtime.rules.condition import Situation
from patchkit.runtime.rules.variables import nccl_variables, vllm_values, vllm_variables


def check(
    text: str,
    where: str,
    situation: Situation,
    *,
    content: FileContent | None = None,
    host: Host | None = None,
    home: Path | None = None,
    mode: int | None = None,
) -> tuple[Finding, ...]:
    """Return what is wrong with a file, in the order of its lines.

    ``where`` is its name, which tells a script from an env file; ``situation`` what is known of
    node and versions (a condition about something unknown does not hold); ``content`` what the file
    says, if it was read before; ``host`` the machine that is to use the file, None for any;
    ``home`` the folder of its vLLM, whose names count instead of those of the version in
    ``situation``; ``mode`` the file's rights. Raises UsageError for a version that is none.
    """
    content = content or read_content(text, where)
    situation = in_cluster(content, situation)
    vllm = situation.get("vllm", "")
    known = {
        "vLLM": vllm_variables(vllm, home),
        "NCCL": nccl_variables(situation.get("nccl", "")),
    }
    findings = [
        *content.problems,
        *check_header(text, content.assignments),
        *check_names(text, content, situation, KnownNames.of(known)),
        *_values(content, situation, host),
        *_choices(content, vllm, home),
        *check_placeholders(content, where),
        *check_secrets(content, mode),
        *check_contradictions(content, host),
        *check_servers(text, content),
        *check_containers(content),
        *check_reading(text, content.kind, head_facts(text).get("format", "")),
        *check_flags(content, situation, home),
        *check_limits(content, situation),
        *check_ray(content, situation),
        *check_advice(content, situation),
    ]
    # Two checks may come to the same finding.
    return tuple(sorted(dict.fromkeys(findings), key=lambda each: each.line))


def _values(content: FileContent, situation: Situation, host: Host | None) -> Iterator[Finding]:
    for each in content.assignments:
        yield from check_value(each, situation)
    yield from check_products(content.assignments)
    yield from check_link_local(content.assignments)
    if host:
        yield from check_host(content.assignments, host)


def _choices(content: FileContent, vllm: str, home: Path | None) -> Iterator[Finding]:
    """Check values by what the release takes; a fork of it may take more."""
    fork = SoftwareOrigin(content).is_fork
    for each in check_choice(content.assignments, vllm, vllm_values(vllm, home)):
        yield replace(each, level=Level.WARNING) if fork else each
