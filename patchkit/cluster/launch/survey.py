"""Check what nodes need to serve one model together. Pure.

The texts of the findings are in recipes/doctor/survey.toml.
"""

from collections.abc import Sequence
from dataclasses import replace

from patchkit.cluster.agent.image_facts import ImageFacts
from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.net.addressing import find_cages
from patchkit.cluster.net.checks import pair_checks
from patchkit.cluster.ssh.ssh import make_finding, ssh_command
from patchkit.errors import StorageError
from patchkit.finding import Finding, Findings, Level, finding_texts
from patchkit.frozen import Fields
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.host.host import Host

_TEXTS = "survey.toml"
SURVEY = read_toml(Fields, RECIPES / "doctor" / _TEXTS, key="survey")


def survey_nodes(names: Sequence[str], facts: Sequence[NodeFacts]) -> Findings:
    """Yield the findings of each node, then those between the head and each worker.

    ``names`` and ``facts`` are by rank.
    """
    between = list(pair_findings(names, facts))
    # If a node has a wrong image, that is its finding: what is in this image does not matter.
    strays = {finding.where for finding in between if finding.about == "image-other"}

    for name, node in zip(names, facts, strict=True):
        for finding in node_findings(name, node):
            if not (name in strays and finding.about == "image-silent"):
                yield finding
    yield from between


def pair_findings(names: Sequence[str], facts: Sequence[NodeFacts]) -> Findings:
    """Yield the findings between the head, which is the first node, and each worker."""
    head_name, *worker_names = names
    head, *workers = facts
    cages = find_cages(head.host, cabled=True)

    for name, worker in zip(worker_names, workers, strict=True):
        nodes = (head_name, name)
        checks = pair_checks(head.host, cages, worker.host, nodes) if cages else ()
        for finding in checks:
            if finding.where in nodes:
                yield finding
            elif finding.level is not Level.OK:
                what = f"{finding.where}: {finding.what}"
                yield replace(finding, where=", ".join(nodes), what=what)
        yield from _software_findings(head_name, name, head, worker)


def _software_findings(
    first: str,
    second: str,
    head: NodeFacts,
    worker: NodeFacts,
) -> Findings:
    """Yield the findings about what differs: installation, image or device.

    ``first`` is the name of the head, ``second`` that of the worker.
    """
    pair = f"{first}, {second}"
    names = {"first": first, "second": second}
    if head.host.system.machine == worker.host.system.machine:
        if head.venv and worker.venv and head.installation != worker.installation:
            yield make_finding(
                "installation",
                pair,
                **names,
                venv=head.venv,
                one=head.installation or "one of its own",
                other=worker.installation or "one of its own",
            )

        contents = {node.image.content for node in (head, worker) if node.image}
        if len(contents - {""}) > 1:
            yield _image_difference({first: head.image, second: worker.image})

    targets = (head.host.target, worker.host.target)
    if targets[0] != targets[1]:
        yield make_finding(
            "devices",
            pair,
            **names,
            one=targets[0],
            other=targets[1],
        )


def _image_difference(images: dict[str, ImageFacts | None]) -> Finding:
    """Return the finding about two nodes with different images.

    If one image has the pin, and the other was found by its tag alone, the other is the wrong one.
    """
    ids = {name: image.id if image else "none" for name, image in images.items()}
    tagged = [name for name, image in images.items() if image and image.by_tag]

    if len(tagged) == 1:
        (stray,) = tagged
        return make_finding("image-other", stray, image=ids[stray])

    first, second = images
    return make_finding(
        "images",
        f"{first}, {second}",
        first=first,
        second=second,
        one=ids[first],
        other=ids[second],
    )


def image_finding(name: str, image: ImageFacts) -> Finding:
    """Return the finding about the problem of a node's engine or image.

    A full disk is an error of the kind StorageError.
    """
    words = image.said.lower()
    cause: Fields = next((row for row in SURVEY["causes"] if row["said"] in words), {})
    about = cause.get("about", image.problem)
    run = cause.get("run", finding_texts(_TEXTS)[about].run)
    cure = [word.format(image=image) for word in run]

    command = ssh_command(name, *cure)
    finding = make_finding(about, name, said=image.said, command=command)

    kinds = {"image-disk-full": StorageError}
    return replace(finding, kind=kinds.get(about, finding.kind))


def node_findings(name: str, facts: NodeFacts) -> Findings:
    """Yield a finding for each thing that a node lacks."""
    note = _describe_missing_gpu(facts.host)
    limit = _low_memlock(facts)
    fine = {
        "gpu": not note,
        "systemd": facts.systemd,
        "linger": facts.linger,
        "memlock": limit is None,
        "journal": facts.persistent_journal,
        "rsync": facts.rsync,
        "groups": facts.unified_groups,
    }
    fields = {"note": note, "user": facts.user, "mib": (limit or 0) >> 20}

    for about, is_fine in fine.items():
        if not is_fine:
            yield make_finding(about, name, **fields)

    if facts.image and facts.image.problem:
        yield image_finding(name, facts.image)


def _describe_missing_gpu(host: Host) -> str:
    """Return why no GPU is found on a DGX Spark; "" if there is one, or on another machine.

    The product's name or the CPU tells a DGX Spark.
    """
    names = f"{host.system.product} {host.system.cpu}"
    is_spark = any(part in names for part in SURVEY["spark"])
    if host.gpus or not is_spark:
        return ""
    return next((note for note in host.notes if "GPU" in note), "no GPU is found")


def _low_memlock(facts: NodeFacts) -> int | None:
    """Return the limit of locked memory, in bytes, if it keeps ranks from RDMA; else None."""
    has_rdma = any(port.active for port in facts.host.rdma)
    # Docker's daemon belongs to root, and has no limit.
    is_docker = facts.image is not None and facts.image.program.endswith("docker")
    if is_docker or not has_rdma:
        return None
    return facts.memlock
