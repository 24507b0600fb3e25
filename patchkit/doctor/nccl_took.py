"""Compare the network that NCCL took with the one that the env file meant. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from patchkit.cluster.ssh.ssh import there
from patchkit.doctor.nccl_log import NcclLog, NcclRank
from patchkit.finding import Finding, finding_from_text

_FILE = "nccl.toml"
_HCA, _IFNAME, _OFF, _NET = (
    *("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"),
    *("NCCL_IB_DISABLE", "NCCL_NET"),
)
_COMPARED = (_HCA, _IFNAME, _OFF, _NET)


def chosen(value: str, name: str, port: int = 1) -> bool:
    """Return whether NCCL_IB_HCA or NCCL_SOCKET_IFNAME of this value takes a device.

    ``^`` leaves out what is listed, ``=`` asks for whole names and comes after it; else the entries
    are prefixes. ``:1`` is a port. An empty list takes all. As matchIfList of NCCL does it.
    """
    left_out = value.startswith("^")
    entries = list(_entries(value))
    listed = not entries or any(_fits(value, each, name, port) for each in entries)
    return listed is not left_out


def _entries(value: str) -> Iterator[str]:
    listed = value.removeprefix("^").removeprefix("=")
    yield from filter(None, (each.strip() for each in listed.split(",")))


def _fits(value: str, entry: str, name: str, port: int) -> bool:
    prefix, _, wanted = entry.partition(":")
    exact = value.removeprefix("^").startswith("=")
    right_port = not wanted.isdigit() or int(wanted) == port
    return right_port and (name == prefix if exact else name.startswith(prefix))


def nccl_findings(
    where: str, log: NcclLog, meant: Mapping[str, str], hostname: str = ""
) -> Iterator[Finding]:
    """Yield what a node's ranks took, against the variables of its env file.

    ``where`` is the node, for what to do there. With ``hostname`` the ranks of other machines,
    which Ray writes into the same log, are left to their own node.
    """
    # NCCL writes a dash for what is neither a letter nor a digit, and no domain.
    own = hostname.partition(".")[0]
    ranks = [each for each in log.ranks if not own or each.host.partition(".")[0] == own]
    if not ranks:
        versions = f"the log has NCCL's version alone ({', '.join(log.versions)})"
        reason = versions if log.versions else "the log has no line of NCCL"
        yield finding_from_text(_FILE, "nccl-silent", where, reason=reason)
    for each in ranks:
        if each.ranks == 1:
            yield finding_from_text(_FILE, "nccl-alone", where)
        elif not each.taken:
            yield finding_from_text(_FILE, "nccl-not-said", where, rank=_name(each))
        else:
            found = [*_against(where, each, meant)]
            yield from found or [_took(where, each)]


def nccl_agreement(logs: Mapping[str, NcclLog]) -> Iterator[Finding]:
    """Yield what the ranks of all nodes do not agree on; ``logs`` by node."""
    ranks = [each for log in logs.values() for each in log.ranks if each.taken]
    where = ", ".join(logs)
    if len({each.over_ib for each in ranks}) > 1:
        networks = ", ".join(f"{_name(each)}: {each.taken}" for each in ranks)
        yield finding_from_text(_FILE, "nccl-networks", where, networks=networks)
    versions = {each.version for each in ranks if each.version}
    versions |= {each for log in logs.values() for each in log.versions}
    if len(versions) > 1:
        yield finding_from_text(_FILE, "nccl-versions", where, versions=", ".join(sorted(versions)))


def _against(where: str, rank: NcclRank, meant: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what differs from the env file; values that reached NCCL first, since they decide."""

    def say(about: str, **fields: object) -> Finding:
        return finding_from_text(
            _FILE, about, where, rank=_name(rank), evidence=rank.evidence, **fields
        )

    for name in _COMPARED:
        if name in meant and (taken := rank.settings.get(name, meant[name])) != meant[name]:
            yield say("nccl-value", name=name, taken=taken, meant=meant[name] or "nothing")
    off = _is_on(meant.get(_OFF, "")) or meant.get(_NET, "").casefold() == "socket"
    if rank.over_ib and _is_on(meant.get(_OFF, "")):
        yield say("nccl-disabled", network=rank.taken, value=meant[_OFF])
    elif rank.over_ib and (value := meant.get(_HCA, "")):
        yield from _devices(where, rank, value)
    elif rank.taken == "Socket" and not off and (rank.no_ib or meant.get(_HCA)):
        yield _sockets(where, rank, meant)
    interface, value = rank.bootstrap, meant.get(_IFNAME, "")
    if interface and value and not chosen(value, interface):
        yield say("nccl-interface", interface=interface, value=value)


def _devices(where: str, rank: NcclRank, value: str) -> Iterator[Finding]:
    """Yield devices that the variable does not choose, and names of it that nothing answers to."""
    taken = list(rank.devices.values()) or [(each, 1) for each in rank.used]
    strange = [name for name, port in taken if not chosen(value, name, port)]
    fields = {"rank": _name(rank), "value": value, "evidence": rank.evidence}
    if strange:
        yield finding_from_text(_FILE, "nccl-devices", where, devices=", ".join(strange), **fields)
        return
    missing = [
        entry
        for entry in _entries(value)
        if not value.startswith("^") and not any(_fits(value, entry, *each) for each in taken)
    ]
    if missing and taken:
        devices, probe = ", ".join(rank.used), there(where, "patchkit", "probe")
        lacks = {"devices": devices, "missing": ", ".join(missing), "probe": probe}
        yield finding_from_text(_FILE, "nccl-half", where, **lacks, **fields)


def _sockets(where: str, rank: NcclRank, meant: Mapping[str, str]) -> Finding:
    """Return that sockets were taken, with what the rank's own words give as the reason."""
    given = {**meant, **rank.settings}
    seen = because = ""
    hint = there(where, "patchkit", "probe")
    if _is_on(rank.settings.get(_OFF, "")) or rank.settings.get(_NET) == "Socket":
        because = f"; {_OFF} or {_NET} reached this rank and turned RoCE off"
        hint = "check the file that this rank was started with: patchkit check FILE"
    elif rank.no_ib:
        seen = f": {rank.no_ib}"
        because = (
            f"; no RDMA device is active here, or none fits {_HCA}={given.get(_HCA, '')}, which "
            "takes names of RDMA devices (rocep1s0f0), not of interfaces; in a container "
            "/dev/infiniband may be missing"
        )
    return finding_from_text(
        _FILE,
        "nccl-socket",
        where,
        rank=_name(rank),
        interfaces=", ".join(rank.used or rank.sockets) or "an unknown interface",
        seen=seen,
        because=because,
        hint=hint,
        evidence=rank.evidence,
    )


def _took(where: str, rank: NcclRank) -> Finding:
    return finding_from_text(
        _FILE,
        "nccl-took",
        where,
        rank=_name(rank),
        version=f"{rank.version} " if rank.version else "",
        network=f"NET/{rank.taken}",
        devices=", ".join(rank.used or rank.sockets) or "devices that it does not name",
        interface=f"; the ranks meet over {rank.bootstrap}" if rank.bootstrap else "",
        evidence=rank.evidence,
    )


def _is_on(value: str) -> bool:
    """Return whether a number turns a switch on, as NCCL reads it: any but 0."""
    return value.strip().lstrip("+-").isdigit() and int(value) != 0


def _name(rank: NcclRank) -> str:
    return f"process {rank.pid} on {rank.host}" if rank.rank is None else f"rank {rank.rank}"
