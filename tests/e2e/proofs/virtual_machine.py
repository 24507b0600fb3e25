"""A machine with a Linux kernel of its own: systemd, sshd, and a user with lingering.

User-mode Linux is a kernel that runs as a program, without help from the processor, so that it
also works where a virtual machine would be emulated. It has one CPU, memory, swap and an
out-of-memory killer of its own. Its source is the distribution's, compiled once; mmdebstrap unpacks
the file system once. Both are kept by a digest of what they are made of. A machine writes into a
file of its own beside the disk that it begins with. ssh reaches it in a network namespace of its
own, from nowhere else. ``python -m e2e.proofs.virtual_machine`` prints what is in the way, or
nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from e2e.emulation.nodes import NodeError
from e2e.proofs import fresh
from patchkit.follow import Completed
from patchkit.process import attempt, run

SOURCE = "linux-source"
COMPILERS = (
    SOURCE,
    "gcc",
    "make",
    "flex",
    "bison",
    "bc",
    "xz-utils",
    "libc6-dev",
    "kmod",
    "perl",
    "python3-minimal",
)
PACKAGES = (
    "systemd",
    "systemd-sysv",
    "dbus",
    "dbus-user-session",
    "libpam-systemd",
    "openssh-server",
    "openssh-client",
    "rsync",
    "curl",
    "procps",
    "iproute2",
    "python3",
    "python3-venv",
)
USER, UID, STRANGER = "spark", 1000, "stranger"
HOME = f"/home/{USER}"
HOST_ADDRESS, ADDRESS = "10.0.2.2", "10.0.2.15"
MEMORY, DISK = 2048, "4G"
BOOT_SECONDS = 180
# What systemd and this test need beside the defaults of user-mode Linux. A kernel that is linked
# statically dies at its first program. One whose stacks are in vmalloc's memory hangs after some
# minutes: it unmaps a stack for a moment, a signal comes, and the handler needs that stack.
OPTIONS = """\
CONFIG_PSI=y
CONFIG_MEMCG=y
CONFIG_CGROUP_PIDS=y
CONFIG_CGROUP_FREEZER=y
CONFIG_CGROUP_SCHED=y
CONFIG_FAIR_GROUP_SCHED=y
CONFIG_CGROUP_BPF=y
CONFIG_BPF_SYSCALL=y
CONFIG_NAMESPACES=y
CONFIG_USER_NS=y
CONFIG_SWAP=y
CONFIG_TMPFS=y
CONFIG_TMPFS_POSIX_ACL=y
CONFIG_TMPFS_XATTR=y
CONFIG_DEVTMPFS=y
CONFIG_DEVTMPFS_MOUNT=y
CONFIG_EXT4_FS=y
CONFIG_EXT4_FS_POSIX_ACL=y
CONFIG_EXT4_FS_SECURITY=y
CONFIG_BLK_DEV_UBD=y
CONFIG_UML_NET=y
CONFIG_UML_NET_TUNTAP=y
CONFIG_STATIC_LINK=n
CONFIG_INET=y
CONFIG_IPV6=y
CONFIG_PACKET=y
CONFIG_AUTOFS_FS=y
CONFIG_FHANDLE=y
CONFIG_SECCOMP=y
CONFIG_SECCOMP_FILTER=y
CONFIG_HIGH_RES_TIMERS=y
CONFIG_MODULES=n
CONFIG_SOUND=n
CONFIG_WLAN=n
CONFIG_WIRELESS=n
CONFIG_ETHERNET=n
CONFIG_DEBUG_INFO_NONE=y
CONFIG_KERNEL_STACK_ORDER=3
CONFIG_VMAP_STACK=n
"""
# The registers of a processor with AMX take 11,008 bytes, and are kept on the larger stack, too.
COMPILE = f"""\
set -eu
cd /usr/src
tar xf {SOURCE}-*.tar.xz
cd {SOURCE}-*/
sed -i 's/HOST_FP_SIZE, 2696/HOST_FP_SIZE, 11264/' arch/x86/um/user-offsets.c
cat > options
make -s ARCH=um defconfig
./scripts/kconfig/merge_config.sh -m .config options > /dev/null
make -s ARCH=um olddefconfig
make -s ARCH=um "-j$(nproc)" linux
strip -o /linux linux
"""
# Run in the new file system. Its disk is /dev/ubda; the console gets what the kernel says. Logins
# come before everything else: the one slow CPU shall not decide whether they take long. sshd would
# refuse logins after some that were given up.
FURNISH = f"""\
set -eu
useradd --create-home --uid {UID} --shell /bin/bash {USER}
useradd --create-home --shell /bin/bash {STRANGER}
mkdir -p /var/lib/systemd/linger /var/log/journal
touch /var/lib/systemd/linger/{USER}
echo sparkvm > /etc/hostname
echo '127.0.0.1 localhost sparkvm' > /etc/hosts
echo '/dev/ubda / ext4 defaults 0 1' > /etc/fstab
printf 'PasswordAuthentication no\\nPerSourcePenalties no\\n' > /etc/ssh/sshd_config.d/keys.conf
cat > /etc/systemd/system/cable.service <<'END'
[Service]
Type=oneshot
ExecStart=ip address add {ADDRESS}/24 dev eth0
ExecStart=ip link set eth0 up
[Install]
WantedBy=multi-user.target
END
mkdir /etc/systemd/system/ssh.service.d
printf '[Service]\nNice=-15\n' > /etc/systemd/system/ssh.service.d/nice.conf
ssh-keygen -A > /dev/null
systemctl --quiet enable cable ssh
systemctl --quiet mask systemd-udevd apt-daily.timer apt-daily-upgrade.timer \\
  fstrim.timer dpkg-db-backup.timer getty@tty1 systemd-tmpfiles-setup-dev-early \\
  systemd-tmpfiles-clean.timer systemd-modules-load systemd-random-seed systemd-hostnamed.socket
rm -rf /var/cache/apt /var/lib/apt/lists /usr/share/doc /usr/share/man /usr/share/locale
"""
_SMALL = ("--variant=minbase", '--aptopt=Apt::Install-Recommends "false"')
_PROGRAMS = ("mkfs.ext4", "ip", "nsenter", "ssh", "ssh-keygen")


def obstacle() -> str:
    """Return why no such machine can be made here; empty if nothing is in the way."""
    if platform.machine() != "x86_64":
        return f"user-mode Linux is for x86-64, and this is {platform.machine()}"
    return fresh.obstacle(*_PROGRAMS)


@dataclass(frozen=True, kw_only=True)
class Base:
    """A disk to begin with, a kernel, and the key that opens it."""

    folder: Path

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    @property
    def kernel(self) -> Path:
        return self.folder / "linux"

    @property
    def key(self) -> Path:
        return self.folder / "id_ed25519"


def ready(cache: Path) -> Base:
    """Return what all machines begin with; it is made if it is not there.

    Raises CalledProcessError after the program that failed said why.
    """
    release = fresh.suite()
    parts = [release, *PACKAGES, DISK, FURNISH, _own_release(), *COMPILERS, OPTIONS]
    made_of = "\n".join(parts)
    folder = cache / f"machine-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return Base(folder=folder)

    begun = cache / f"{folder.name}.{os.getpid()}"
    begun.mkdir(parents=True)
    try:
        _compile_kernel(begun)
        _make_disk(begun, release)
        begun.rename(folder)
    finally:
        shutil.rmtree(begun, ignore_errors=True)
    return Base(folder=folder)


def _compile_kernel(folder: Path) -> None:
    """Compile it for the C library of this machine, on which it runs."""
    root = folder / "root"
    fresh.unpack(root, COMPILERS, *_SMALL, release=_own_release())
    line = ("chroot", str(root), "sh", "-c", COMPILE)
    subprocess.run(line, input=OPTIONS.encode(), check=True)
    shutil.copy(root / "linux", folder / "linux")
    shutil.rmtree(root)


def _own_release() -> str:
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "")


def _make_disk(folder: Path, release: str) -> None:
    root = folder / "root"
    furnish = f'--customize-hook=chroot "$1" sh -c {shlex.quote(FURNISH)}'
    fresh.unpack(root, PACKAGES, *_SMALL, furnish, release=release)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "id_ed25519"))
    for home, owner in ((f"home/{USER}", UID), ("root", 0)):
        place = root / home / ".ssh"
        place.mkdir(mode=0o700, exist_ok=True)
        shutil.copy(folder / "id_ed25519.pub", place / "authorized_keys")
        for path in (place, place / "authorized_keys"):
            os.chown(path, owner, owner)

    run("mkfs.ext4", "-q", "-d", str(root), str(folder / "disk"), DISK, timeout=600)
    shutil.rmtree(root)


@dataclass(kw_only=True)
class Machine:
    """A machine that runs; ``folder`` has its disk, its console, and the configuration of ssh."""

    name: str
    folder: Path
    base: Base
    memory: int = MEMORY  # MiB
    number: int = field(default_factory=count().__next__)
    kernel: subprocess.Popen[bytes] | None = None

    @property
    def network(self) -> str:
        return f"machine-{os.getpid()}-{self.number}"

    @property
    def disk(self) -> Path:
        """Return the disk of the moment that ``put_back`` goes on from."""
        return self.folder / "disk"

    @property
    def console(self) -> Path:
        return self.folder / "console.log"

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh_config"

    @property
    def ssh_program(self) -> Path:
        """Return the folder of an ``ssh`` that knows this machine by its name."""
        return self.folder / "bin"

    def start(self) -> None:
        """Switch it on with a new disk; return when its user's own units can be started."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.ssh_program.mkdir(parents=True)
        run("cp", "--sparse=always", str(self.base.disk), str(self.disk), timeout=600)
        self.write_ssh()
        self._power_on(f"ubd0={self.disk}")

    def write_ssh(self) -> None:
        """Write the configuration of ssh, and an `ssh` that reads it."""
        self.ssh_config.write_text(
            f"Host {self.name}\n  HostName {ADDRESS}\n  User {USER}\n"
            f"  IdentityFile {self.base.key.resolve()}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n"
            "  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n  BatchMode yes\n"
            # Cheap ones: what costs a login time here should be memory.
            "  KexAlgorithms curve25519-sha256\n  Ciphers aes128-gcm@openssh.com\n"
        )
        program = self.ssh_program / "ssh"
        program.write_text(f'#!/bin/sh\nexec {shlex.join(self._ssh)} "$@"\n')
        program.chmod(0o755)

    def make_network(self) -> None:
        """Make the namespace in which the machine has one cable, to this side of it."""
        run("ip", "netns", "add", self.network)
        for line in (
            "tuntap add dev cable mode tap",
            f"address add {HOST_ADDRESS}/24 dev cable",
            "link set cable up",
            "link set lo up",
        ):
            run("ip", "-n", self.network, *line.split())

    def remove_network(self) -> None:
        attempt("ip", "netns", "delete", self.network)

    def save(self) -> None:
        """Shut it down; its disk is what ``put_back`` goes on from."""
        assert self.kernel is not None
        self.root("systemctl", "poweroff", "--no-block")
        self.kernel.wait(timeout=BOOT_SECONDS)

    def put_back(self) -> None:
        """Boot it as it was saved; what it writes goes into a file that the next time replaces."""
        self.stop()
        changes = self.folder / "changes"
        changes.unlink(missing_ok=True)
        self._power_on(f"ubd0={changes},{self.disk}")

    def stop(self) -> None:
        """Cut its power: the kernel and its processes are one group of this machine's."""
        if self.kernel is not None and self.kernel.poll() is None:
            os.killpg(self.kernel.pid, 9)
            self.kernel.wait()

    def user(
        self, *words: str | Path, seconds: int = 30, input: bytes = b""
    ) -> Completed:
        """Run a command as the user, in a login of its own."""
        return self._run(USER, words, seconds, input)

    def root(
        self, *words: str | Path, seconds: int = 30, input: bytes = b""
    ) -> Completed:
        return self._run("root", words, seconds, input)

    @property
    def _inside(self) -> tuple[str, ...]:
        return ("nsenter", f"--net=/run/netns/{self.network}")

    @property
    def _ssh(self) -> tuple[str, ...]:
        program = shutil.which("ssh") or "ssh"
        return (*self._inside, program, "-F", str(self.ssh_config))

    def _run(
        self, user: str, words: tuple[str | Path, ...], seconds: int, input: bytes
    ) -> Completed:
        there = shlex.join(map(str, words))
        line = (*self._ssh, f"{user}@{self.name}", there)
        return attempt(*line, timeout=seconds, input=input)

    def _power_on(self, disk: str) -> None:
        words = (
            disk,
            f"mem={self.memory}M",
            "eth0=tuntap,cable",
            "root=/dev/ubda",
            "rw",
            "con=null",
            "con0=null,fd:1",
            "console=tty0",
            "net.ifnames=0",
        )
        # Its memory is a file of the host: in memory, not on a disk.
        env = {**os.environ, "TMPDIR": "/dev/shm"}
        ended_with_us = ("setpriv", "--pdeathsig", "KILL")
        with self.console.open("wb") as console:
            self.kernel = subprocess.Popen(
                [*self._inside, *ended_with_us, str(self.base.kernel), *words],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=env,
                start_new_session=True,
            )
        ready = ("systemctl", "-q", "is-active", f"user@{UID}.service")
        self._wait_until(lambda: not self.user(*ready, seconds=20).trouble)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOOT_SECONDS
        while not condition():
            if self.kernel is None or self.kernel.poll() is not None:
                raise NodeError(f"{self.name}: the kernel ended; see {self.console}")
            if time.monotonic() > deadline:
                raise NodeError(f"{self.name} does not come up; see {self.console}")
            time.sleep(0.3)


@contextlib.contextmanager
def running(
    name: str, folder: Path, base: Base, *, memory: int = MEMORY
) -> Iterator[Machine]:
    """Boot a machine; its power is cut at the end."""
    machine = Machine(name=name, folder=folder.resolve(), base=base, memory=memory)
    machine.make_network()
    try:
        machine.start()
        yield machine
    finally:
        machine.stop()
        machine.remove_network()


if __name__ == "__main__":
    sys.stdout.write(obstacle())
