"""Say how an earlier boot of each node ended."""

from patchkit.cluster.agent.boot_end import BootEnd, read_boot_end
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.ssh.node import Remote, run_on_all
from patchkit.cluster.ssh.ssh import make_finding
from patchkit.doctor.cluster_checks import check_ssh
from patchkit.doctor.examination import Examination
from patchkit.doctor.peers.node_report import NodeReport
from patchkit.finding import Finding, Findings


def examine_boot(cluster: Cluster, boot: int) -> Examination:
    """Return how a boot of each node ended: -1 is the one before the present boot.

    A node that does not answer is a finding, not an error.
    """

    def look(node: Remote) -> BootEnd:
        return node.call(BootEnd, read_boot_end, name=cluster.name, boot=boot)

    findings: list[Finding] = []
    answers = run_on_all(cluster.nodes, look)
    for node, answer in zip(cluster.nodes, answers, strict=True):
        name = node.destination
        if isinstance(answer, BootEnd):
            findings += boot_findings(name, answer)
        else:
            findings += check_ssh(NodeReport(node=name, silence=answer))
    return Examination(findings=tuple(findings), lines=())


def boot_findings(name: str, end: BootEnd) -> Findings:
    """Yield the findings about the end of a boot of the node ``name``."""
    about = "boot-orderly" if end.orderly else "boot-reset"
    if end.unread:
        about = "boot-unread"
    yield make_finding(about, name, end=end)

    if end.kernel:
        count = len(end.kernel)
        yield make_finding("boot-kernel", name, count=count, end=end)
    if end.crashes:
        files = ", ".join(end.crashes)
        yield make_finding("boot-crash", name, files=files)
