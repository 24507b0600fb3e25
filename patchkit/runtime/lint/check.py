"""Check env files and scripts: names, values, contradictions, this host, secrets and servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from patchkit.finding import Finding
from patchkit.runtime.envfile.header import head_facts
from patchkit.runtime.host.host import Host
from patchkit.runtime.lint.choices import check_choice
from patchkit.runtime.lint.contradictions import check_contradictions
from patchkit.runtime.lint.flags import check_flags
from patchkit.runtime.lint.header import check_header
from patchkit.runtime.lint.host import check_host
from patchkit.runtime.lint.hygiene import check_reading, check_secret, check_servers
from patchkit.runtime.lint.names import check_names
from patchkit.runtime.lint.scan import Assignment, scan
from patchkit.runtime.lint.values import check_products, check_value
from patchkit.runtime.rules.condition import Situation
from patchkit.runtime.rules.variable_rules import load_variable_rules
from patchkit.runtime.rules.variables import Guesses, nccl_variables, vllm_values, vllm_variables


def check(
    text: str,
    where: str,
    situation: Situation,
    *,
    host: Host | None = None,
    home: Path | None = None,
    mode: int | None = None,
) -> tuple[Finding, ...]:
    """Return what is wrong with a file, in the order of its lines.

    ``where`` is its name, which tells a script from an env file; ``situation`` what is known of
    node and versions (a condition about something unknown does not hold); ``host`` the machine that
    is to use the file, None for any; ``home`` the folder of its vLLM, whose names count instead of
    those of the version in ``situation``; ``mode`` the file's rights. Raises UsageError for a
    version that is none.
    """
    vllm = situation.get("vllm", "")
    known = {
        "vLLM": vllm_variables(vllm, home),
        "NCCL": nccl_variables(situation.get("nccl", "")),
    }
    assigned = scan(text, where)
    findings = [
        *check_header(text, assigned),
        *_each(assigned, situation, known, host, mode),
        *check_choice(assigned, vllm, vllm_values(vllm, home)),
        *check_products(assigned),
        *check_contradictions(assigned, host),
        *check_servers(text),
        *check_reading(text, where, head_facts(text).get("format", "")),
        *check_flags(text, situation, home),
    ]
    # Two checks may come to the same finding.
    return tuple(sorted(dict.fromkeys(findings), key=lambda each: each.line))


def _each(
    assigned: Sequence[Assignment],
    situation: Situation,
    known: Mapping[str, Mapping[str, str]],
    host: Host | None,
    mode: int | None,
) -> Iterator[Finding]:
    """Check each variable by itself."""
    avoids = load_variable_rules().avoids_by_name
    # Made once: they keep what was asked, and give up after many names.
    guesses = {reader: Guesses(names) for reader, names in known.items()}
    for each in assigned:
        yield from check_names(each, situation, known, avoids, guesses)
        yield from check_value(each, situation)
        yield from check_secret(each, mode)
        if host:
            yield from check_host(each, host)
