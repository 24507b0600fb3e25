"""A Debian or Ubuntu for aarch64 in a folder, and its programs run on this machine.

Packages are unpacked and not configured: their scripts would take ten minutes under qemu, and
Python does without. The kernel starts programs for aarch64 itself on aarch64; elsewhere it is told
to start qemu for them, in namespaces of their own, so that nothing of this machine is changed.
"""

from __future__ import annotations

import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.proofs import fresh
from patchkit.errors import HostError, ProofError

CPU = "aarch64"
PACKAGES = (
    *("base-files", "coreutils", "dash", "libc-bin", "mount"),
    *("python3", "python3-pip", "ca-certificates", "libgomp1", "libstdc++6"),
)
QEMU, BINFMT = "qemu-aarch64-static", "/proc/sys/fs/binfmt_misc"
# An ELF file of 64 bits, little-endian (ELF header, bytes 4 and 5), a program or a shared object
# (e_type 2 or 3), for EM_AARCH64 (183). F: the kernel opens qemu now, so that it works in a chroot.
MAGIC = r"\x7fELF\x02\x01\x01" + r"\x00" * 9 + r"\x02\x00\xb7\x00"
MASK = r"\xff" * 7 + r"\x00" + r"\xff" * 8 + r"\xfe\xff\xff\xff"
SPACES = (*fresh.SPACES, "--net")
PATIENCE = (
    3600  # seconds for one program; qemu takes ten times as long as the CPU itself
)

# In a user namespace the kernel keeps another list of interpreters (since Linux 6.7). Its first
# process waits until this one has written who is who in it: everybody is who he was.
_OWN_USERS = ("unshare", "--user", "sh", "-c", 'echo ready; read -r _; exec "$@"', "sh")
_EVERYBODY = "0 0 4294967295\n"


def obstacle(*programs: str) -> str:
    """Return why no file system for aarch64 can be used here; empty if nothing is in the way."""
    if found := fresh.obstacle(*programs, *([QEMU] if _needs_own_users() else [])):
        return found
    done = in_namespaces("true", patience=60)
    if done.returncode and _needs_own_users():
        return (
            "the kernel starts qemu for no program: Linux before 6.7 needs it registered for all: "
            f"sudo apt install binfmt-support ({done.stderr.strip()})"
        )
    return (
        f"namespaces are not allowed here: {done.stderr.strip()}"
        if done.returncode
        else ""
    )


def _needs_own_users() -> bool:
    registered = Path(BINFMT, "qemu-aarch64")
    # Without F the kernel looks for qemu where the program is: not there, in another root.
    everywhere = registered.exists() and re.search(
        r"(?m)^flags: \w*F", registered.read_text()
    )
    return platform.machine() != CPU and not everywhere


def in_namespaces(
    script: str, variables: Mapping[str, str] | None = None, *, patience: int = PATIENCE
) -> subprocess.CompletedProcess[str]:
    """Run a script of sh where programs for aarch64 can be started, without a network.

    ``patience`` is in seconds; then it is killed, and TimeoutExpired raised.
    """
    own_users = _needs_own_users()
    if own_users:
        entry = f":qemu-aarch64:M::{MAGIC}:{MASK}:{shutil.which(QEMU)}:OCF"
        mounts = f"mount -t proc proc /proc\nmount -t binfmt_misc none {BINFMT}"
        script = f"{mounts}\nprintf %s '{entry}' > {BINFMT}/register\n{script}"
    command = [*(_OWN_USERS if own_users else ()), *SPACES, "sh", "-euc", script]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**fresh.PLAIN, **(variables or {})},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if own_users and process.stdout.readline() == "ready\n":
                for name in ("uid_map", "gid_map"):
                    Path(f"/proc/{process.pid}/{name}").write_text(_EVERYBODY)
                process.stdin.write("go\n")
            output, errors = process.communicate(timeout=patience)
        except BaseException:
            process.kill()  # with it the kernel ends everything in its namespaces
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class RootFs:
    """A file system for aarch64; ``binds`` are files and folders of this machine, by their path."""

    path: Path
    binds: Mapping[Path, str]

    @property
    def python(self) -> str:
        """Return the version of its Python, ``3.13``."""
        return (self.path / "usr/bin/python3").readlink().name.removeprefix("python")

    @property
    def packages(self) -> Path:
        """Return the folder, seen from here, of packages that an administrator installs."""
        return self.path / f"usr/local/lib/python{self.python}/dist-packages"

    def seen_inside(self, path: Path) -> str:
        """Return a path as it is inside."""
        return f"/{path.relative_to(self.path)}"

    def run(self, *words: str, **variables: str) -> str:
        """Return what a program says, without a network. Raises ProofError if it fails."""
        # What is registered is forgotten with the last mount of the list.
        kept = {Path(BINFMT): BINFMT} if _needs_own_users() else {}
        script = fresh.entering(
            self.path, {**self.binds, **kept}, f"exec {shlex.join(words)}"
        )
        try:
            done = in_namespaces(script, variables)
        except subprocess.TimeoutExpired:
            raise ProofError(
                f"{words[0]} … gave no answer within {PATIENCE} s"
            ) from None
        if done.returncode:
            said = (done.stderr or done.stdout).strip()[-1500:]
            raise ProofError(
                f"{' '.join(words[:4])} … ended with {done.returncode}:\n{said}"
            )
        return done.stdout


def unpack(path: Path) -> None:
    """Unpack the distribution. Raises HostError after mmdebstrap said why it cannot."""
    try:
        fresh.unpack(path, PACKAGES, "--variant=extract", cpu="arm64")
    except subprocess.CalledProcessError as error:
        raise HostError(f"mmdebstrap ended with {error.returncode}") from None
    # A script of base-passwd would make it; torch asks for the name of who runs it.
    (path / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
