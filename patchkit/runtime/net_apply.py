"""Applying a plan and taking it back, all or nothing, with the network if it is this machine's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import HostError, PatchkitError
from patchkit.runtime import net_live, net_state
from patchkit.runtime.net_state import Place
from patchkit.runtime.netplan import Plan
from patchkit.runtime.netplan_file import render


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What happened; ``recovered`` if a change that was cut short was put back first.

    ``checked`` if netplan read the file before it was written.
    """

    changed: bool
    live: bool
    checked: bool = False
    recovered: bool = False


def is_live(place: Place) -> bool:
    """Whether the root is that of this machine, so that its network follows the file."""
    return place.root.resolve() == Path("/")


def apply(place: Place, plan: Plan, *, force: bool) -> Done:
    """Write the file and bring the network to it; everything is as before if that fails.

    Raises DriftError, HostError, StorageError or BusyError.
    """
    data, addresses, live = render(plan).encode(), given(plan), is_live(place)
    with net_state.locked(place), net_live.undisturbed():
        recovered = _recover(place)
        net_state.check_untouched(place, force=force)
        if place.text() == data:
            return Done(changed=False, live=live, recovered=recovered)
        checked = net_live.check_merge(place.root, data)
        if live and not checked:
            raise HostError(
                "netplan is not installed, so nobody would read the file",
                why="this is no DGX OS, or a container",
                hint="give the addresses that `patchkit net plan` shows by other means",
            )
        former = place.applied()
        folder = net_state.begin(place, data, addresses)
        if live:
            _activate_or_go_back(place, folder, addresses, former)
        net_state.finish(folder)
    return Done(changed=True, live=live, checked=checked, recovered=recovered)


def undo(place: Place) -> Done:
    """Put back what was there before the last change, the network included.

    Raises UsageError if there is none, DriftError if the file was edited since.
    """
    with net_state.locked(place), net_live.undisturbed():
        unfinished = place.unfinished() is not None
        _take_back(place, net_state.last(place))
    return Done(changed=True, live=is_live(place), recovered=unfinished)


def given(plan: Plan) -> Mapping[str, Sequence[str]]:
    """The addresses of a plan, as they are noted: netdev → ``address/prefix``."""
    return {line.netdev: [line.address.with_prefixlen] for line in plan.lines}


def _recover(place: Place) -> bool:
    """Put back what a killed run had begun."""
    folder = place.unfinished()
    if folder is not None:
        _take_back(place, folder)
    return folder is not None


def _take_back(place: Place, folder: Path) -> None:
    former = net_state.read_step(folder).addresses
    net_state.take_back(place, folder)
    if is_live(place):
        net_live.activate(_before(place, folder), former)
    net_state.forget(folder)


def _before(place: Place, folder: Path) -> Mapping[str, Sequence[str]]:
    """The addresses that patchkit had given before a change."""
    earlier = [each for each in place.steps() if int(each.name) < int(folder.name)]
    return net_state.read_step(earlier[-1]).addresses if earlier else {}


def _activate_or_go_back(
    place: Place,
    folder: Path,
    addresses: Mapping[str, Sequence[str]],
    former: Mapping[str, Sequence[str]],
) -> None:
    try:
        net_live.activate(addresses, former)
    except BaseException as error:
        try:
            _take_back(place, folder)
        except PatchkitError as worse:
            raise HostError(
                f"{error}\nand putting back what was there failed, too: {worse.what}",
                hint="sudo patchkit net undo",
            ) from error
        if isinstance(error, PatchkitError):
            error.what += "; the former network is back"
            error.args = (error.what,)
        raise
