"""Apply a plan and undo it, all or nothing, with the network if it is this machine's.

Below ``<root>/var/lib/patchkit/net/`` every change is a numbered folder

    step.json   digests of the file before and after, its mode before, the addresses given
    before      the bytes that were replaced, absent if there was no file
    after       the bytes that were written

which is written with the netplan file and removed with it. While a change is under way, its journal
lies beside them; it is taken back unless the network has followed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from patchkit.cluster.net.netplan_file import OURS, render_netplan
from patchkit.cluster.net.plan import Given, NetPlan
from patchkit.digests import Digest, digest
from patchkit.durable import lock
from patchkit.durable.journal import Change, Journal
from patchkit.errors import HostError, PatchkitError, translated
from patchkit.process import run
from patchkit.quoting import quoted
from patchkit.records import RecordError, read_json, record
from patchkit.runtime.rules.refusals import refusal

_STATE = Path("var/lib/patchkit/net")
_MODE = 0o600  # netplan warns about files that others may read
_NETPLAN_SECONDS = 120  # `netplan apply` waits for systemd
_BACK_SECONDS = 20.0  # until an address is there again; DHCP may have to be asked anew


@dataclass(frozen=True, slots=True, kw_only=True)
class NetChange(Given):
    """One change. Digests are ``""`` for no file; ``mode`` is that of the file before.

    ``node`` and ``mtu`` are those of the plan, 0 if it has none or several.
    """

    before: Digest
    after: Digest
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NetResult:
    """What was done; ``recovered`` if a change that was cut short was put back first."""

    changed: bool
    live: bool
    recovered: bool = False


@dataclass(frozen=True, slots=True)
class NetHistory:
    """Where the file and its history lie, below a root."""

    root: Path

    @property
    def file(self) -> Path:
        """Return patchkit's netplan file."""
        return self.root / OURS

    @property
    def live(self) -> bool:
        """Return whether the root is that of this machine, so that its network follows the file."""
        return self.root.resolve() == Path("/")

    @property
    def journal(self) -> Journal:
        """Return the journal of a change under way."""
        at = () if self.root == Path("/") else ("--root", self.root)
        undo = quoted("sudo", "patchkit", "net", "undo", *at)
        return Journal(
            root=self.root,
            folder=self.root / _STATE / "journal",
            home=self.root / _STATE,
            again=undo,
            rescue=f"{undo} --force",
            allowed=lambda path: path == str(OURS) or path.startswith(f"{_STATE}/"),
            one_file_system=False,  # /var may be a disk of its own
            folder_mode=0o755,  # whatever the umask: `plan` and `verify` read it without rights
        )

    def read_file(self) -> bytes | None:
        """Return the bytes of patchkit's netplan file, None if there is none."""
        try:
            return self.file.read_bytes()
        except FileNotFoundError:
            return None

    def step_folders(self) -> tuple[Path, ...]:
        """Return the folders of the changes, the oldest first."""
        # The journal and what it leaves have names, changes have numbers.
        folders = (folder for folder in (self.root / _STATE).glob("*") if folder.name.isdigit())
        return tuple(sorted(folders, key=lambda folder: int(folder.name)))

    def read_given(self, before: int = 0) -> Given:
        """Return what the last change gave, or one ``before`` it; needs no rights."""
        folders = self.step_folders()
        return read_step(folders[-1 - before]) if len(folders) > before else Given()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the history for one writer who outlives a hangup. Raises BusyError, StorageError."""
        with translated():
            folder = (self.root / _STATE).parent
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)  # as the journal's folder_mode
        with lock.locked(folder):
            # The link under an SSH session may be what is changed.
            former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, former)


def read_step(folder: Path) -> NetChange:
    """Read the note of a change. Raises StorageError if it is damaged."""
    path = folder / "step.json"
    try:
        return read_json(NetChange, path.read_bytes())
    except (OSError, RecordError) as error:
        raise refusal("net-step", path=path, error=error, before=folder / "before") from None


def apply_plan(place: NetHistory, plan: NetPlan, *, force: bool) -> NetResult:
    """Write the file and bring the network to it; everything is as before if that fails.

    A plan that sets nothing leaves a file as it is: what it says is kept.

    Raises DriftError, HostError, StorageError or BusyError.
    """
    data, live = render_netplan(plan).encode(), place.live
    with place.hold():
        # First, since a change that was cut short may have left the file old or new.
        recovered = recover_network(place) is not None
        steps, before = place.step_folders(), place.read_file()
        if digest(before) != (read_step(steps[-1]).after if steps else "") and not force:
            why = "it was removed" if before is None else "somebody wrote or edited it"
            raise refusal("netplan-drift", file=place.file, why=why)
        if before == data or not plan.written:
            return NetResult(changed=False, live=live, recovered=recovered)
        if live and not shutil.which("netplan"):
            raise refusal("no-netplan")
        changes, step = changes_to_write(place, data, plan)
        _commit_changes(place, changes, "apply", step)
    return NetResult(changed=True, live=live, recovered=recovered)


def changes_to_write(
    place: NetHistory, data: bytes, plan: NetPlan
) -> tuple[list[Change], NetChange]:
    """Return the changes that write the file of a plan and note what was there.

    Raises DriftError.
    """
    if place.file.is_symlink():
        raise refusal("netplan-link", file=place.file, remove=quoted("sudo", "rm", place.file))
    steps, before = place.step_folders(), place.read_file()
    number = int(steps[-1].name) + 1 if steps else 1
    mtus = {line.mtu for line in plan.written}
    step = NetChange(
        before=digest(before),
        after=digest(data),
        mode=place.file.stat().st_mode & 0o7777 if before is not None else _MODE,
        addresses={line.netdev: tuple(map(str, line.addresses)) for line in plan.written},
        node=plan.node or 0,
        mtu=mtus.pop() if len(mtus) == 1 else 0,
    )
    note = json.dumps(asdict(step), indent=1).encode()
    kept = {"before": before, "after": data, "step.json": note}
    changes = [
        # `plan` and `verify` read the note without rights; the file's bytes are root's.
        Change(f"{_STATE}/{number}/{name}", "", text, 0o644 if name == "step.json" else _MODE)
        for name, text in kept.items()
        if text is not None
    ]
    return [*changes, Change(str(OURS), step.before, data, _MODE)], step


def undo_plan(place: NetHistory, *, force: bool = False) -> NetResult:
    """Put back what was there before the last change, the network included.

    ``force`` sets a journal aside that cannot be read. Raises UsageError if there is nothing to
    undo, DriftError if the file was edited since.
    """
    with place.hold():
        if force:
            place.journal.discard(place.root / _STATE / "journal.damaged")
        if recover_network(place) == "apply":  # taking that back is what was asked for
            return NetResult(changed=True, live=place.live, recovered=True)
        folders = place.step_folders()
        if not folders:
            raise refusal("net-nothing", folder=place.root / _STATE)
        folder, found = folders[-1], place.read_file()
        step = read_step(folder)
        if digest(found) not in (step.before, step.after):
            aside = quoted("sudo", "mv", place.file, f"{place.file}.mine")
            again = quoted("sudo", "cp", folder / "after", place.file)
            raise refusal("netplan-edited", file=place.file, aside=aside, back=again)
        former = (folder / "before").read_bytes() if step.before else None
        if digest(former) != step.before:
            raise refusal("net-before", path=folder / "before")
        # The file itself may be back already; the note of the change goes all the same.
        back = [] if found == former else [Change(str(OURS), digest(found), former, step.mode)]
        back += [
            Change(file.relative_to(place.root).as_posix(), digest(file.read_bytes()), None)
            for file in (folder / name for name in ("before", "after", "step.json"))
            if file.exists()
        ]
        # The addresses of the change before it count again.
        _commit_changes(place, back, "undo", place.read_given(before=1))
    return NetResult(changed=True, live=place.live)


def _commit_changes(place: NetHistory, changes: Sequence[Change], verb: str, given: Given) -> None:
    """Change the files, then the network from the former addresses to others, or neither."""
    former = place.read_given().addresses
    # For a later run, which has to bring the network back without the plan; lists, as it reads it.
    note = json.loads(json.dumps({"verb": verb, "addresses": given.addresses, "former": former}))
    gone_back = False

    def unsettle() -> None:
        nonlocal gone_back
        _activate_back(place, note)
        gone_back = place.live

    try:
        settle = partial(activate_network, given.addresses, former) if place.live else None
        place.journal.commit(changes, settle=settle, unsettle=unsettle, note=note)
    except PatchkitError as error:
        if gone_back:
            error.what += "; the former network is back"
            error.args = (error.what,)
        raise


def _activate_back(place: NetHistory, note: Mapping[str, Any]) -> None:
    try:
        former, addresses = (
            record(dict[str, tuple[str, ...]], note.get(key)) for key in ("former", "addresses")
        )
    except RecordError as error:
        rescue, folder = place.journal.rescue, place.journal.folder
        raise refusal("net-journal", folder=folder, error=error, rescue=rescue) from None
    if place.live:
        activate_network(former, addresses)


def recover_network(place: NetHistory) -> str | None:
    """Put back what a killed run had begun; return its verb, None if there was nothing."""
    note = place.journal.recover(lambda note: _activate_back(place, note))
    return None if note is None else str(note.get("verb"))


def activate_network(
    given: Mapping[str, Sequence[str]], former: Mapping[str, Sequence[str]]
) -> None:
    """Bring the network to what the files say; HostError if netplan fails or the way in is lost.

    ``given`` and ``former`` are the addresses that patchkit's file has, and had.
    """
    # Before anything changes: the addresses of a default route and of the SSH session are those
    # through which people reach this machine. Without a family ip shows routes of IPv4 alone.
    routes = [row for family in ("-4", "-6") for row in run_ip(family, "route", "show", "default")]
    ways, session = {row.get("dev") for row in routes}, _find_session_address(os.getpid())
    kept = {
        address
        for dev, address, lasting in _list_addresses()
        if dev not in {*given, *former}  # which are meant to change
        if (dev in ways and lasting) or address.split("/")[0] == session
    }
    run("netplan", "generate")  # finds errors without touching an interface
    run("netplan", "apply", timeout=_NETPLAN_SECONDS)
    # networkd leaves addresses that patchkit gave and takes back where they are.
    present = {(dev, address) for dev, address, _ in _list_addresses()}
    for netdev, addresses in former.items():
        for address in set(addresses) - set(given.get(netdev, ())):
            if (netdev, address) in present:
                run("ip", "address", "del", address, "dev", netdev)
    until = time.monotonic() + _BACK_SECONDS
    while lost := kept - {address for _, address, _ in _list_addresses()}:
        if time.monotonic() > until:
            raise refusal("net-lost", lost=", ".join(sorted(lost)))
        time.sleep(0.5)  # seconds between two looks


def _find_session_address(process: int) -> str:
    """Return the address of this machine that the SSH session uses, "" for none.

    sudo removes SSH_CONNECTION (client's address and port, server's address and port); a parent
    process still has it.
    """
    while process > 1:
        try:
            home = Path("/proc") / str(process)
            for variable in (home / "environ").read_bytes().split(b"\0"):
                if variable.startswith(b"SSH_CONNECTION="):
                    return variable.decode(errors="replace").split()[2]
            # The second field, the name in parentheses, may hold blanks and parentheses itself.
            process = int((home / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            return ""
    return ""


def _list_addresses() -> Iterator[tuple[str, str, bool]]:
    """Yield netdev, ``address/prefix``, and whether it is global and not temporary (IPv6)."""
    for netdev in run_ip("address", "show"):
        for entry in netdev.get("addr_info", ()):
            if "local" in entry:
                lasting = entry.get("scope") == "global" and not entry.get("temporary")
                yield netdev["ifname"], f"{entry['local']}/{entry['prefixlen']}", lasting


def run_ip(*arguments: str) -> list[dict[str, Any]]:
    """Return what ``ip -json`` answers. Raises HostError if it is missing or refuses."""
    done = run("ip", "-json", *arguments)
    try:
        # Some versions of ip print nothing where the list is empty.
        return read_json(list[dict[str, Any]], done.output or "[]")
    except RecordError:
        raise HostError(f"{done.shown} printed {done.output[:80]!r}, not JSON") from None
