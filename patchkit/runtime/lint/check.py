"""Env files and scripts, checked: names, values, contradictions, this host, and manners."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from patchkit.finding import Finding
from patchkit.runtime.envfile.header import head_facts
from patchkit.runtime.host.host import Host
from patchkit.runtime.lint.contradictions import check_pairs
from patchkit.runtime.lint.flags import check_flags
from patchkit.runtime.lint.header import check_header
from patchkit.runtime.lint.host import check_host
from patchkit.runtime.lint.hygiene import check_doors, check_reading, check_secret
from patchkit.runtime.lint.names import check_names
from patchkit.runtime.lint.scan import scan
from patchkit.runtime.lint.values import check_products, check_value
from patchkit.runtime.rules.variable_rules import Situation, load_rules
from patchkit.runtime.rules.variables import Guesses, nccl_variables, vllm_variables


def check(
    text: str,
    where: str,
    situation: Situation,
    *,
    known: Mapping[str, str] | None = None,
    host: Host | None = None,
    home: Path | None = None,
    mode: int | None = None,
) -> tuple[Finding, ...]:
    """What speaks against a file, in the order of its lines.

    ``where`` is its name, which tells a script from an env file; ``situation`` what is known of
    node and versions (a condition about something unknown does not hold); ``known`` the variables
    of the installed vLLM, by default those of the version in ``situation``; ``host`` the machine
    that is to use the file, None for any; ``home`` the folder of its vLLM; ``mode`` the file's
    rights. Raises UsageError for a version that is none.
    """
    names = {
        "vLLM": vllm_variables(situation.get("vllm", "")) if known is None else known,
        "NCCL": nccl_variables(situation.get("nccl", "")),
    }
    findings = dict.fromkeys(
        (
            *_findings(text, where, situation, names, host, mode),
            *check_flags(text, situation, home),
        )
    )
    return tuple(sorted(findings, key=lambda each: each.line))


def _findings(
    text: str,
    where: str,
    situation: Situation,
    known: Mapping[str, Mapping[str, str]],
    host: Host | None,
    mode: int | None,
) -> Iterator[Finding]:
    all_found = scan(text, where)
    yield from check_header(text, all_found)
    avoids = load_rules().avoids_by_name
    guesses = {reader: Guesses(names) for reader, names in known.items()}
    for found in all_found:
        yield from check_names(found, situation, known, avoids, guesses)
        yield from check_value(found, situation)
        yield from check_secret(found, mode)
        if host:
            yield from check_host(found, host)
    yield from check_products(all_found)
    yield from check_pairs(all_found, host)
    yield from check_doors(text)
    yield from check_reading(text, where, head_facts(text).get("format", ""))
