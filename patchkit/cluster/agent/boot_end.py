"""Read how a boot of a machine ended: the journal, the guard's figures. Runs on the node."""

import re
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from patchkit.cluster.agent.memory_record import last_figures, recorded_boots
from patchkit.foreign import clock_text, read_json
from patchkit.frozen import Fields, Texts, frozen
from patchkit.process import attempt

_LAST = 40  # lines of the journal, among which those of an orderly end are
_MOST = 20  # lines of the kernel, and files
_LONGEST = 300  # characters of a line
_ORDERLY = re.compile(
    "Journal stopped|Reached target.*(?:[Ss]hutdown|[Rr]eboot|[Pp]ower|[Ee]xit)"
)
# Of the kernel and NVIDIA's driver. Xid 81 (0x51) and NV_ERR_NO_MEMORY (0x51) came before Sparks
# stood still: open-gpu-kernel-modules#1358.
_TROUBLE = re.compile(
    "NV_ERR_NO_MEMORY|NVRM: Xid|0x0*51\\b|Out of memory: Killed|soft lockup|blocked for more than"
    "|Kernel panic|Hardware Error"
)
_CRASHES = (Path("/sys/fs/pstore"), Path("/var/lib/systemd/pstore"))


@frozen
class BootEnd:
    """The end of a boot, in the node's words.

    ``moment`` is when anything was last written, "" if nothing is known of the boot; ``unread``
    says then why. ``orderly`` says that the system was told to end. ``memory`` is how much was
    left, by the guard's last figures. ``kernel`` are lines of the kernel that tell of trouble,
    ``crashes`` the files that kernels left when they crashed, of any boot.
    """

    moment: str = ""
    unread: str = ""
    orderly: bool = False
    memory: str = ""
    kernel: Texts = ()
    crashes: Texts = ()


def read_boot_end(name: str, boot: int) -> BootEnd:
    """Return the end of a boot: -1 is the one before this. ``name`` is the guard's cluster.

    A user who may not read the system's journal gets what the user's own journal has.
    """
    words = ("journalctl", f"--boot={boot}", "--quiet", "--no-pager")
    newest = attempt(*words, f"--lines={_LAST}", "--output=json")
    entries = list(_read_entries(newest.output))

    if not entries:
        reason = newest.trouble or "the journal has nothing of it"
        return BootEnd(unread=f"{reason}; {_last_recorded(name)}")

    boot_id = str(uuid.UUID(entries[-1]["_BOOT_ID"]))
    ended = int(entries[-1]["__REALTIME_TIMESTAMP"]) / 1e6
    memory = "how much memory was left is not known"
    if figures := last_figures(name, boot_id):
        moment, left, was_ended = figures
        ended = max(ended, moment)
        if not was_ended:
            memory = f"{left / 1024:.1f} GiB of memory were left {ended - moment:.0f} s before"

    kernel = attempt(*words, "--dmesg", "--output=short-iso").output.splitlines()
    troubles = [line[:_LONGEST] for line in kernel if _TROUBLE.search(line)]
    texts = (str(entry.get("MESSAGE", "")) for entry in entries)
    return BootEnd(
        moment=clock_text(ended),
        orderly=any(map(_ORDERLY.search, texts)),
        memory=memory,
        kernel=tuple(troubles[-_MOST:]),
        crashes=tuple(_find_crashes()),
    )


def _last_recorded(name: str) -> str:
    """Return the guard's last figures of an earlier boot, in words: of which one nobody knows."""
    boots = recorded_boots(name)
    figures = last_figures(name, boots[-1]) if boots else None
    if not figures:
        return "there are no figures of an earlier boot"
    moment, left, _ended = figures
    return f"in some earlier boot {left / 1024:.1f} GiB of memory were left at {clock_text(moment)}"


def _read_entries(output: str) -> Iterator[Fields]:
    """Yield the entries of `journalctl --output=json` that have a time and a boot."""
    for line in output.splitlines():
        with suppress(ValueError, KeyError, TypeError):
            entry = read_json(line)
            uuid.UUID(entry["_BOOT_ID"])
            int(entry["__REALTIME_TIMESTAMP"])
            yield entry


def _find_crashes() -> Iterator[str]:
    """Yield the files that kernels left when they crashed, as far as this user may see them."""
    for folder in _CRASHES:
        with suppress(OSError):
            for file in sorted(folder.iterdir())[-_MOST:]:
                yield str(file)
