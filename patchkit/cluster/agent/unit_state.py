"""Read the states of units of this node's user, as systemd shows them. Runs on the node."""

import time
from collections.abc import Iterator, Sequence

from patchkit.cluster.agent.node_files import run_for_user
from patchkit.cluster.ssh.ssh import TOOLS
from patchkit.frozen import Fields, Texts, frozen
from patchkit.records import read_toml

RUNNING = ("active", "activating")
OFF = ("inactive", "failed")
"""Values of ``UnitState.active``: RUNNING if a unit runs or starts, OFF if it does not run."""

_STUCK = (
    "dead",
    "failed",
    "auto-restart",
)  # sub-states in which a unit with a job waits for another unit
# Field of a UnitState → systemd's property.
_PROPERTIES = read_toml(dict[str, str], TOOLS, key="properties")


@frozen
class UnitState:
    """The state of a unit, in systemd's words.

    ``since`` is the time of its last change, ``text`` the status line that it gave systemd.
    ``invocation`` is the id of the run, "" if there is none. A unit that cannot start before
    another unit runs is "activating" and "waiting": systemd has no word for that. ``drop_ins`` are
    files that change the unit; ``changed`` says that its file is newer than what systemd has read.
    """

    unit: str
    active: str
    sub: str
    result: str
    status: str
    restarts: int
    since: str
    invocation: str
    description: str
    text: str
    drop_ins: Texts
    changed: bool


def unit_states(units: Sequence[str]) -> Iterator[UnitState]:
    """Yield the states of units, in their order, also of units that do not exist.

    Raises HostError if systemd does not answer.
    """
    properties = ",".join(_PROPERTIES.values())
    words = ("show", f"--property={properties}", "--", *units)
    shown = run_for_user("systemctl", *words, check=True).output

    for block in shown.strip().split("\n\n"):
        yield _read_unit(block)


def _read_unit(block: str) -> UnitState:
    """Return the state of a unit from a block of lines PROPERTY=VALUE."""
    values = dict(line.partition("=")[::2] for line in block.splitlines())
    fields: Fields = {name: values.get(key, "") for name, key in _PROPERTIES.items()}

    if fields["sub"].startswith("auto-restart"):
        fields["sub"] = "auto-restart"  # systemd 254 has auto-restart-queued as well

    has_job = fields.pop("job")
    if has_job and fields["sub"] in _STUCK:
        fields.update(
            active="activating",
            sub="waiting",
            invocation="",
        )

    fields["restarts"] = int(fields["restarts"] or 0)
    fields["drop_ins"] = tuple(fields["drop_ins"].split())
    fields["changed"] = fields["changed"] == "yes"
    return UnitState(**fields)


def follow_units(units: Sequence[str]) -> Iterator[list[UnitState]]:
    """Yield the states of units now, and again at each change, without an end.

    Raises HostError if systemd does not answer.
    """
    former: list[UnitState] = []
    while True:
        states = list(unit_states(units))
        if states != former:
            yield states
            former = states
        time.sleep(0.25)


def begin_unit(unit: str) -> None:
    """Start a unit that has ended; do not wait for it. Raises HostError."""
    run_for_user("systemctl", "reset-failed", unit)
    run_for_user("systemctl", "start", "--no-block", unit, check=True)
