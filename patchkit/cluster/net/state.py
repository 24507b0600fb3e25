"""Change the netplan file on disk and the way back together, through one journal.

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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from patchkit.cluster.net.netplan_file import OURS
from patchkit.cluster.net.plan import Given, NetPlan
from patchkit.digests import Digest, digest
from patchkit.durable import lock
from patchkit.durable.failure import translated
from patchkit.durable.journal import Change, Journal
from patchkit.errors import DriftError, StorageError, UsageError
from patchkit.quoting import quoted
from patchkit.records import RecordError, read_json

STATE = Path("var/lib/patchkit/net")
Addresses = Mapping[str, tuple[str, ...]]
"""Netdev → ``address/prefix``."""

MODE = 0o600  # netplan warns about files that others may read


@dataclass(frozen=True, slots=True, kw_only=True)
class NetChange:
    """One change. Digests are ``""`` for no file; ``mode`` is that of the file before.

    ``node`` and ``mtu`` are those of the plan, 0 if it has none or several.
    """

    before: Digest
    after: Digest
    mode: int
    addresses: Addresses
    node: int = 0
    mtu: int = 0


@dataclass(frozen=True, slots=True)
class NetHistory:
    """Where the file and its history lie, below a root."""

    root: Path

    @property
    def file(self) -> Path:
        return self.root / OURS

    @property
    def state(self) -> Path:
        return self.root / STATE

    @property
    def journal(self) -> Journal:
        at = () if self.root == Path("/") else ("--root", self.root)
        undo = quoted("sudo", "patchkit", "net", "undo", *at)
        return Journal(
            root=self.root,
            folder=self.state / "journal",
            home=self.state,
            again=undo,
            rescue=f"{undo} --force",
            allowed=lambda path: path == str(OURS) or path.startswith(f"{STATE}/"),
            one_file_system=False,  # /var may be a disk of its own
            folder_mode=0o755,  # whatever the umask: `plan` and `verify` read it without rights
        )

    def read_file(self) -> bytes | None:
        try:
            return self.file.read_bytes()
        except FileNotFoundError:
            return None

    def step_folders(self) -> tuple[Path, ...]:
        """Return the folders of the changes, the oldest first."""
        # The journal and what it leaves have names, changes have numbers.
        numbers = (folder for folder in self.state.glob("*") if folder.name.isdigit())
        return tuple(sorted(numbers, key=lambda folder: int(folder.name)))

    def read_given(self, before: int = 0) -> Given:
        """Return what the last change gave, or one ``before`` it; needs no rights."""
        folders = self.step_folders()
        if len(folders) <= before:
            return Given()
        step = read_step(folders[-1 - before])
        return Given(addresses=step.addresses, node=step.node, mtu=step.mtu)


@contextlib.contextmanager
def lock_history(place: NetHistory) -> Iterator[None]:
    """Hold the history for one writer. Raises BusyError, StorageError."""
    with translated():
        folder = place.state.parent
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)  # as journal's folder_mode
    with lock.locked(folder):
        yield


def changes_to_write(place: NetHistory, data: bytes, plan: NetPlan) -> list[Change]:
    """Return the changes that write the file of a plan and note what was there.

    Raises DriftError.
    """
    if place.file.is_symlink():
        raise DriftError(
            f"{place.file}: is a symbolic link",
            why="patchkit writes a file there, and would replace the link",
            hint=quoted("sudo", "rm", place.file),
        )
    steps = place.step_folders()
    number = int(steps[-1].name) + 1 if steps else 1
    before = place.read_file()
    mtus = {line.mtu for line in plan.written}
    step = NetChange(
        before=digest(before),
        after=digest(data),
        mode=place.file.stat().st_mode & 0o7777 if before is not None else MODE,
        addresses={line.netdev: tuple(map(str, line.addresses)) for line in plan.written},
        node=plan.node or 0,
        mtu=mtus.pop() if len(mtus) == 1 else 0,
    )
    note = json.dumps(asdict(step), indent=1).encode()
    kept = {"before": before, "after": data, "step.json": note}
    return [
        *(
            # `plan` and `verify` read the note without rights; the file's bytes are root's.
            Change(f"{STATE}/{number}/{name}", "", text, 0o644 if name == "step.json" else MODE)
            for name, text in kept.items()
            if text is not None
        ),
        Change(str(OURS), step.before, data, MODE),
    ]


def changes_to_undo(place: NetHistory) -> list[Change]:
    """Return the changes that put back what was there before the last one.

    Raises UsageError if there is none, DriftError if somebody edited the file since.
    """
    folders = place.step_folders()
    if not folders:
        raise UsageError(
            "there is nothing to undo", why=f"{place.state} has no change of patchkit's"
        )
    folder = folders[-1]
    step = read_step(folder)
    found = place.read_file()
    if digest(found) not in (step.before, step.after):
        raise DriftError(
            f"{place.file}: edited since patchkit wrote it",
            why="it is neither what patchkit wrote nor what was there before",
            hint=f"put it aside: {quoted('sudo', 'mv', place.file, f'{place.file}.mine')}; "
            f"then {quoted('sudo', 'cp', folder / 'after', place.file)}; "
            "and run `patchkit net undo` again",
        )
    former = (folder / "before").read_bytes() if step.before else None
    if digest(former) != step.before:
        raise StorageError(
            f"{folder / 'before'}: is not what was there before", why="somebody edited it"
        )
    noted = [folder / name for name in ("before", "after", "step.json")]
    # The file itself may be back already; the note of the change goes all the same.
    back = [] if found == former else [Change(str(OURS), digest(found), former, step.mode)]
    return back + [
        Change(file.relative_to(place.root).as_posix(), digest(file.read_bytes()), None)
        for file in noted
        if file.exists()
    ]


def check_untouched(place: NetHistory, *, force: bool) -> None:
    """Raise DriftError if the file is not as patchkit left it, unless forced."""
    steps = place.step_folders()
    known = read_step(steps[-1]).after if steps else ""
    if digest(place.read_file()) != known and not force:
        raise DriftError(
            f"{place.file}: is not as patchkit left it",
            why="somebody wrote or edited it"
            if place.read_file() is not None
            else "it was removed",
            hint="look at the difference with --dry-run --force; --force replaces it "
            "(`net undo` puts it back)",
        )


def read_step(folder: Path) -> NetChange:
    """Read the note of a change. Raises StorageError if it is damaged."""
    path = folder / "step.json"
    try:
        return read_json(NetChange, path.read_bytes())
    except (OSError, RecordError) as error:
        raise StorageError(
            f"{path}: is damaged: {error}", hint=f"{folder / 'before'} is what was there"
        ) from None
