"""Check what nodes need to serve one model together, before anything is written. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.net.checks import pair_checks
from patchkit.cluster.net.plan import find_cages
from patchkit.cluster.ssh.ssh import there
from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.runtime.host.hardware import is_spark, target_of

_LIMIT = "/etc/systemd/system/user@.service.d/patchkit.conf"


def survey_nodes(names: Sequence[str], facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield what is wrong, node by node, then between the head and each worker."""
    for name, its in zip(names, facts, strict=True):
        yield from node_findings(name, its)
    yield from pair_findings(names, facts)


def pair_findings(names: Sequence[str], facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield what is wrong between the head, the first of these nodes, and each worker."""
    head = facts[0]
    for name, its in zip(names[1:], facts[1:], strict=True):
        yield from _compare_with_head(names[0], head, name, its)


def node_findings(name: str, facts: NodeFacts) -> Iterator[Finding]:
    """Yield what a node lacks."""

    def wrong(about: str, what: str, why: str, hint: str, level: Level = Level.ERROR) -> Finding:
        return Finding(
            kind=HostError, where=name, about=about, what=what, why=why, hint=hint, level=level
        )

    if not facts.host.gpus and is_spark(facts.host):
        yield wrong(
            "gpu",
            next((each for each in facts.host.notes if "GPU" in each), "no GPU is found"),
            "this is a GB10: its driver is not loaded, or a container was started without --gpus",
            there(name, "nvidia-smi") + "; after an update of the kernel or the driver, reboot it",
        )
    if facts.systemd == 0 or "systemctl" not in facts.has:
        yield wrong("systemd", "no systemd answers", "it keeps the ranks", "use DGX OS")
    if not facts.linger:
        yield wrong(
            "linger",
            f"units of {facts.user} end when the last login does",
            "a server must outlive the ssh session, and come back after a reboot",
            there(name, "loginctl", "enable-linger"),
        )
    if facts.memlock is not None and any(each.active for each in facts.host.rdma):
        yield wrong(
            "memlock",
            f"user units may lock {facts.memlock >> 20} MiB of memory",
            "RoCE registers gigabytes, and fails with `Cannot allocate memory`; a user cannot "
            "raise this limit",
            there(name, *memlock_cure()) + "; then reboot it",
        )
    if not facts.persistent_journal:
        yield wrong(
            "journal",
            "the journal is lost at a reboot",
            "it says why a rank ended",
            there(name, "sudo", "mkdir", "-p", "/var/log/journal"),
            Level.WARNING,
        )
    if "rsync" not in facts.has:
        yield wrong(
            "rsync",
            "rsync is missing",
            "wheels and models are copied by it",
            there(name, "sudo", "apt", "install", "rsync"),
        )


def memlock_cure() -> tuple[str, ...]:
    """Return the command that writes the drop-in, as words; root has to run it, then reboot."""
    folder = _LIMIT.rpartition("/")[0]
    words = f"mkdir -p {folder} && printf '[Service]\\nLimitMEMLOCK=infinity\\n' > {_LIMIT}"
    return ("sudo", "sh", "-c", words)


def _compare_with_head(first: str, head: NodeFacts, name: str, its: NodeFacts) -> Iterator[Finding]:
    pair = f"{first}, {name}"
    chosen = find_cages(head.host, cabled=True)
    for each in pair_checks(head.host, chosen, its.host) if chosen else ():
        if each.level is not Level.OK:
            yield Finding(
                kind=each.kind,
                level=each.level,
                where=pair,
                about=each.about,
                what=f"{each.where}: {each.what}",
                why=each.why,
                hint=each.hint,
            )
    same_cpu = head.host.system.machine == its.host.system.machine
    if head.venv and its.venv and same_cpu and head.installation != its.installation:
        used = [each.installation or "one of its own" for each in (head, its)]
        yield Finding(
            kind=HostError,
            where=pair,
            about="installation",
            what=f"{head.venv} is {used[0]} on {first}, and {used[1]} on {name}",
            why="an install or a rollback was cut short, or one node's link was moved by hand",
            hint="patchkit cluster install",
        )
    kinds = target_of(head.host), target_of(its.host)
    if kinds[0] != kinds[1]:
        yield Finding(
            kind=HostError,
            level=Level.WARNING,
            where=pair,
            about="devices",
            what=f"{kinds[0]} and {kinds[1]} differ",
            why="tensor parallelism over two kinds of GPU has no proof upstream: a pipeline is "
            "taken, and nobody has shown it to work",
        )
