"""Apply a plan and undo it, all or nothing, with the network if it is this machine's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkit.cluster.net import live as net_live
from patchkit.cluster.net import state as net_state
from patchkit.cluster.net.netplan_file import render_netplan
from patchkit.cluster.net.plan import NetPlan
from patchkit.cluster.net.state import NetHistory
from patchkit.durable.journal import Change
from patchkit.errors import HostError, PatchkitError, StorageError
from patchkit.records import RecordError, record


@dataclass(frozen=True, slots=True, kw_only=True)
class NetResult:
    """What was done; ``recovered`` if a change that was cut short was put back first.

    ``checked`` if netplan read the file before it was written.
    """

    changed: bool
    live: bool
    checked: bool = False
    recovered: bool = False


def is_live(place: NetHistory) -> bool:
    """Return whether the root is that of this machine, so that its network follows the file."""
    return place.root.resolve() == Path("/")


def apply_plan(place: NetHistory, plan: NetPlan, *, force: bool) -> NetResult:
    """Write the file and bring the network to it; everything is as before if that fails.

    A plan that sets nothing leaves a file as it is: what it says is kept.

    Raises DriftError, HostError, StorageError or BusyError.
    """
    data, live = render_netplan(plan).encode(), is_live(place)
    addresses = {line.netdev: list(map(str, line.addresses)) for line in plan.written}
    with net_state.lock_history(place), net_live.ignore_hangup():
        # First, since a change that was cut short may have left the file old or new.
        recovered = recover_network(place) is not None
        net_state.check_untouched(place, force=force)
        if place.read_file() == data or not plan.written:
            return NetResult(changed=False, live=live, recovered=recovered)
        # Before anything is written: netplan reads all files as one configuration.
        checked = net_live.check_merge(place.root, data)
        if live and not checked:
            raise HostError(
                "netplan is not installed, so nothing would read the file",
                why="this is not DGX OS, or it is a container",
                hint="give the addresses that `patchkit net plan` shows by other means",
            )
        changes = net_state.changes_to_write(place, data, plan)
        _commit_changes(place, changes, "apply", addresses)
    return NetResult(changed=True, live=live, checked=checked, recovered=recovered)


def undo_plan(place: NetHistory, *, force: bool = False) -> NetResult:
    """Put back what was there before the last change, the network included.

    ``force`` sets a journal aside that cannot be read. Raises UsageError if there is nothing to
    undo, DriftError if the file was edited since.
    """
    with net_state.lock_history(place), net_live.ignore_hangup():
        if force:
            place.journal.discard(place.state / "journal.damaged")
        if recover_network(place) == "apply":  # taking that back is what was asked for
            return NetResult(changed=True, live=is_live(place), recovered=True)
        changes = net_state.changes_to_undo(place)
        # The addresses of the change before it count again.
        _commit_changes(place, changes, "undo", place.read_given(before=1).addresses)
    return NetResult(changed=True, live=is_live(place))


def _commit_changes(
    place: NetHistory,
    changes: Sequence[Change],
    verb: str,
    addresses: Mapping[str, Sequence[str]],
) -> None:
    """Change the files, then the network from the former addresses to others, or neither."""
    former = place.read_given().addresses
    # For a later run, which has to bring the network back without the plan.
    note = {"verb": verb, "addresses": addresses, "former": former}
    gone_back = False

    def unsettle() -> None:
        nonlocal gone_back
        _activate_back(place, note)
        gone_back = True

    try:
        place.journal.commit(
            changes,
            settle=lambda: _activate_if_live(place, addresses, former),
            unsettle=unsettle,
            note=note,
        )
    except PatchkitError as error:
        if gone_back and is_live(place):
            error.what += "; the former network is back"
            error.args = (error.what,)
        raise


def _activate_if_live(
    place: NetHistory, addresses: Mapping[str, Sequence[str]], former: Mapping[str, Sequence[str]]
) -> None:
    if is_live(place):
        net_live.activate_network(addresses, former)


def _activate_back(place: NetHistory, note: Mapping[str, Any]) -> None:
    try:
        former, addresses = (
            record(dict[str, tuple[str, ...]], note.get(key)) for key in ("former", "addresses")
        )
    except RecordError as error:
        raise StorageError(
            f"{place.journal.folder}: does not say which addresses there were: {error}",
            why="somebody edited it",
            hint=place.journal.rescue,
        ) from None
    _activate_if_live(place, former, addresses)


def recover_network(place: NetHistory) -> str | None:
    """Put back what a killed run had begun; return its verb, None if there was nothing."""
    note = place.journal.recover(lambda note: _activate_back(place, note))
    return None if note is None else str(note.get("verb"))
