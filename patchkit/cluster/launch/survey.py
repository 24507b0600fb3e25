"""Check what nodes need to serve one model together, before anything is written. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.net.checks import pair_checks
from patchkit.cluster.net.plan import find_cages
from patchkit.cluster.ssh.ssh import there
from patchkit.finding import Finding, Level, finding_from_text
from patchkit.runtime.host.hardware import is_spark, target_of

_LIMIT = "/etc/systemd/system/user@.service.d/patchkit.conf"


def survey_nodes(names: Sequence[str], facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield what is wrong, node by node, then between the head and each worker."""
    for name, its in zip(names, facts, strict=True):
        yield from node_findings(name, its)
    yield from pair_findings(names, facts)


def pair_findings(names: Sequence[str], facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield what is wrong between the head, the first of these nodes, and each worker."""
    first, head = names[0], facts[0]
    cages = find_cages(head.host, cabled=True)
    for name, its in zip(names[1:], facts[1:], strict=True):
        wrong = partial(finding_from_text, "survey.toml", where=f"{first}, {name}")
        for found in pair_checks(cages, its.host) if cages else ():
            if found.level is not Level.OK:
                what = f"{found.where}: {found.what}"
                yield replace(found, where=f"{first}, {name}", what=what)
        same_cpu = head.host.system.machine == its.host.system.machine
        if head.venv and its.venv and same_cpu and head.installation != its.installation:
            one, other = (node.installation or "one of its own" for node in (head, its))
            names_of = {"one": one, "first": first, "other": other, "second": name}
            yield wrong("installation", venv=head.venv, **names_of)
        one, other = target_of(head.host), target_of(its.host)
        if one != other:
            yield wrong("devices", one=one, other=other)


def node_findings(name: str, facts: NodeFacts) -> Iterator[Finding]:
    """Yield what a node lacks."""
    wrong = partial(finding_from_text, "survey.toml", where=name)
    if not facts.host.gpus and is_spark(facts.host):
        note = next((note for note in facts.host.notes if "GPU" in note), "no GPU is found")
        yield wrong("gpu", note=note, command=there(name, "nvidia-smi"))
    if facts.systemd == 0 or "systemctl" not in facts.has:
        yield wrong("systemd")
    if not facts.linger:
        yield wrong("linger", user=facts.user, command=there(name, "loginctl", "enable-linger"))
    if facts.memlock is not None and any(port.active for port in facts.host.rdma):
        command = there(name, *memlock_cure())
        yield wrong("memlock", mib=facts.memlock >> 20, command=command)
    if not facts.persistent_journal:
        yield wrong("journal", command=there(name, "sudo", "mkdir", "-p", "/var/log/journal"))
    if "rsync" not in facts.has:
        yield wrong("rsync", command=there(name, "sudo", "apt", "install", "rsync"))


def memlock_cure() -> tuple[str, ...]:
    """Return the command that writes the drop-in, as words; root has to run it, then reboot."""
    folder = _LIMIT.rpartition("/")[0]
    words = f"mkdir -p {folder} && printf '[Service]\\nLimitMEMLOCK=infinity\\n' > {_LIMIT}"
    return ("sudo", "sh", "-c", words)
