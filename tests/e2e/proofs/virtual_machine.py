"""A virtual machine with a kernel of its own: systemd, sshd, and a user with lingering.

mmdebstrap unpacks its distribution and Debian's or Ubuntu's kernel once, into a disk that is kept
by a digest of what it is made of. A machine writes into a copy of its own, can be put back to an
earlier moment within seconds, and is reached by ssh at a port of 127.0.0.1 alone.
``python -m e2e.proofs.virtual_machine`` prints what is in the way here, or nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from e2e.emulation.nodes import NodeError
from e2e.proofs import fresh
from patchkit.follow import Completed
from patchkit.process import attempt, run

KERNELS = {"debian": "linux-image-cloud-amd64", "ubuntu": "linux-image-virtual"}
PACKAGES = (
    "initramfs-tools",
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
    "kmod",
    "python3",
    "python3-venv",
)
USER, UID, STRANGER = "spark", 1000, "stranger"
HOME = f"/home/{USER}"
ADDRESS = "10.0.2.15"  # the first that qemu's own network gives
MEMORY, CORES, DISK = 2048, 2, "4G"
# Ends with the process that started it, and leaves that the larger part of a core.
UNDER = ("setpriv", "--pdeathsig", "KILL", "nice", "-n", "5")
KVM, KVM_SECONDS = "kvm", 5
BOOT_SECONDS = 240  # without KVM it is slow
# Run in the new file system. Its disk is /dev/vda; the console gets what the kernel says.
FURNISH = f"""\
set -eu
useradd --create-home --uid {UID} --shell /bin/bash {USER}
useradd --create-home --shell /bin/bash {STRANGER}
mkdir -p /var/lib/systemd/linger /var/log/journal
touch /var/lib/systemd/linger/{USER}
echo sparkvm > /etc/hostname
echo '127.0.0.1 localhost sparkvm' > /etc/hosts
echo '/dev/vda / ext4 defaults 0 1' > /etc/fstab
echo 'PasswordAuthentication no' > /etc/ssh/sshd_config.d/keys.conf
cat > /etc/systemd/network/cable.network <<'END'
[Match]
Name=e*
[Network]
Address={ADDRESS}/24
END
ssh-keygen -A > /dev/null
systemctl --quiet enable systemd-networkd ssh
systemctl --quiet mask systemd-networkd-wait-online apt-daily.timer apt-daily-upgrade.timer \
  e2scrub_reap fstrim.timer dpkg-db-backup.timer
rm -rf /var/cache/apt /var/lib/apt/lists /usr/share/doc /usr/share/man /usr/share/locale
"""
CPU = "max,la57=off,erms=off,fsrm=off,avx=off,avx2=off"
KERNEL = "root=/dev/vda rw console=ttyS0 net.ifnames=0 mitigations=off quiet"
_PROGRAMS = (
    "qemu-system-x86_64",
    "qemu-img",
    "mkfs.ext4",
    "ssh",
    "ssh-keygen",
)


def obstacle() -> str:
    """Return why no such machine can be made here; empty if nothing is in the way."""
    if platform.machine() != "x86_64":
        return f"the virtual machine is an x86-64 one, and this is {platform.machine()}"
    return fresh.obstacle(*_PROGRAMS)


@dataclass(frozen=True, kw_only=True)
class Base:
    """A disk to begin with, its kernel, and the key that opens it."""

    folder: Path

    @property
    def disk(self) -> Path:
        return self.folder / "disk.qcow2"

    @property
    def key(self) -> Path:
        return self.folder / "id_ed25519"


def ready(cache: Path) -> Base:
    """Return the disk that all machines begin with; it is made if it is not there.

    Raises CalledProcessError after mmdebstrap said why.
    """
    release = fresh.suite()
    kernel = KERNELS[platform.freedesktop_os_release()["ID"]]
    packages = sorted({*PACKAGES, kernel})
    made_of = "\n".join([release, *packages, DISK, FURNISH])
    folder = cache / f"machine-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return Base(folder=folder)

    begun = cache / f"{folder.name}.{os.getpid()}"
    begun.mkdir(parents=True)
    try:
        _make_base(begun, packages, release)
        begun.rename(folder)
    finally:
        shutil.rmtree(begun, ignore_errors=True)
    return Base(folder=folder)


def _make_base(folder: Path, packages: list[str], release: str) -> None:
    root = folder / "root"
    options = ("--variant=minbase", '--aptopt=Apt::Install-Recommends "false"')
    furnish = f'--customize-hook=chroot "$1" sh -c {shlex.quote(FURNISH)}'
    fresh.unpack(root, packages, *options, furnish, release=release)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "id_ed25519"))
    for home, owner in ((f"home/{USER}", UID), ("root", 0)):
        place = root / home / ".ssh"
        place.mkdir(mode=0o700, exist_ok=True)
        shutil.copy(folder / "id_ed25519.pub", place / "authorized_keys")
        for path in (place, place / "authorized_keys"):
            os.chown(path, owner, owner)

    for name in ("vmlinuz", "initrd.img"):
        (found,) = (root / "boot").glob(f"{name}-*")
        shutil.copy(found, folder / name)
    raw = folder / "disk.raw"
    run("mkfs.ext4", "-q", "-d", str(root), str(raw), DISK, timeout=600)
    disk = str(folder / "disk.qcow2")
    run("qemu-img", "convert", "-O", "qcow2", str(raw), disk, timeout=600)
    raw.unlink()
    shutil.rmtree(root)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def find_accelerator(base: Base) -> str:
    """Return KVM if a kernel begins with it, else qemu's own emulation.

    Within another virtual machine /dev/kvm may be there and run no kernel of a distribution.
    """
    words = ("qemu-system-x86_64", "-machine", "q35", "-accel", KVM, "-cpu", "max")
    kernel = ("-kernel", str(base.folder / "vmlinuz"), "-append", "console=ttyS0")
    console = ("-display", "none", "-serial", "stdio", "-no-reboot", "-m", "512")
    done = attempt(*words, *kernel, *console, timeout=KVM_SECONDS)
    return KVM if "Linux version" in done.output else "tcg,thread=multi"


@dataclass(kw_only=True)
class Machine:
    """A machine that runs; ``folder`` has its disk, its console, and the configuration of ssh."""

    name: str
    folder: Path
    base: Base
    accelerator: str
    memory: int = MEMORY  # MiB
    port: int = field(default_factory=_free_port)
    qemu: subprocess.Popen[bytes] | None = None

    @property
    def is_emulated(self) -> bool:
        return self.accelerator != KVM

    @property
    def disk(self) -> Path:
        return self.folder / "disk.qcow2"

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
        """Switch it on, with a new disk; return when its user's own units can be started."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.ssh_program.mkdir(parents=True)
        backing = ("-F", "qcow2", "-b", str(self.base.disk.resolve()))
        run("qemu-img", "create", "-q", "-f", "qcow2", *backing, str(self.disk))
        self.write_ssh()
        self._power_on()
        ready = f"systemctl -q is-active ssh user@{UID}.service"
        self._wait_until(lambda: not self.root(*shlex.split(ready)).trouble)

    def write_ssh(self) -> None:
        """Write the configuration of ssh, and an `ssh` that reads it."""
        self.ssh_config.write_text(
            f"Host {self.name}\n  HostName 127.0.0.1\n  Port {self.port}\n  User {USER}\n"
            f"  IdentityFile {self.base.key.resolve()}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n"
            "  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n  BatchMode yes\n"
            # Others take seconds where each instruction is emulated.
            "  KexAlgorithms curve25519-sha256\n  Ciphers aes128-gcm@openssh.com\n"
        )
        program = self.ssh_program / "ssh"
        config = shlex.quote(str(self.ssh_config))
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
        program.chmod(0o755)

    def save(self, moment: str) -> None:
        """Keep memory and disk as they are now, under this name."""
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.settimeout(120)
            monitor.connect(str(self.folder / "monitor"))
            _read_prompt(monitor)
            monitor.sendall(f"savevm {moment}\n".encode())
            answer = _read_prompt(monitor)
        if "Error" in answer:
            raise NodeError(f"{self.name}: {answer}")

    def put_back(self, moment: str) -> None:
        """Let it go on from a moment that was saved.

        In a new process: in the old one the clock of an emulated CPU would leap, and systemd's
        watchdogs with it.
        """
        self.stop()
        self._power_on("-loadvm", moment)
        self._wait_until(lambda: not self.user("true").trouble)

    def stop(self) -> None:
        """Cut its power."""
        if self.qemu is not None:
            self.qemu.kill()
            self.qemu.wait()

    def user(
        self, *words: str | Path, seconds: int = 30, input: bytes = b""
    ) -> Completed:
        """Run a command as the user, in a login of its own."""
        return self._run(USER, words, seconds, input)

    def root(
        self, *words: str | Path, seconds: int = 30, input: bytes = b""
    ) -> Completed:
        return self._run("root", words, seconds, input)

    def _run(
        self, user: str, words: tuple[str | Path, ...], seconds: int, input: bytes
    ) -> Completed:
        there = shlex.join(map(str, words))
        line = ("ssh", "-F", str(self.ssh_config), f"{user}@{self.name}", there)
        return attempt(*line, timeout=seconds, input=input)

    def _power_on(self, *more: str) -> None:
        network = f"user,id=lan,restrict=on,hostfwd=tcp:127.0.0.1:{self.port}-:22"
        drive = f"file={self.disk},if=virtio,format=qcow2,cache=unsafe,discard=unmap"
        words = {
            "machine": "q35",
            "accel": self.accelerator,
            "cpu": CPU,
            "smp": str(CORES),
            "m": str(self.memory),
            "kernel": str(self.base.folder / "vmlinuz"),
            "initrd": str(self.base.folder / "initrd.img"),
            "append": KERNEL,
            "drive": drive,
            "netdev": network,
            "display": "none",
            "serial": f"file:{self.console}",
            "monitor": f"unix:{self.folder}/monitor,server,nowait",
        }
        options = [part for key, value in words.items() for part in (f"-{key}", value)]
        devices = ("-device", "virtio-net-pci,netdev=lan", "-device", "virtio-rng-pci")
        with (self.folder / "qemu.log").open("wb") as log:
            self.qemu = subprocess.Popen(
                [*UNDER, "qemu-system-x86_64", *options, *devices, *more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOOT_SECONDS
        while not condition():
            if self.qemu is None or self.qemu.poll() is not None:
                raise NodeError(f"{self.name}: qemu ended; see {self.folder}/qemu.log")
            if time.monotonic() > deadline:
                raise NodeError(f"{self.name} does not come up; see {self.folder}")
            time.sleep(0.5)


@contextlib.contextmanager
def running(
    name: str, folder: Path, base: Base, *, memory: int = MEMORY, kept: bool = False
) -> Iterator[Machine]:
    """Boot a machine; its power is cut at the end.

    One that was ``kept`` has its disk of a former run, and is off until it is put back.
    """
    machine = Machine(
        name=name,
        folder=folder.resolve(),
        base=base,
        accelerator=find_accelerator(base),
        memory=memory,
    )
    try:
        if kept:
            machine.write_ssh()
        else:
            machine.start()
        yield machine
    finally:
        machine.stop()


def _read_prompt(monitor: socket.socket) -> str:
    text = b""
    while not text.endswith(b"(qemu) "):
        more = monitor.recv(4096)
        if not more:
            raise NodeError("qemu's monitor hung up")
        text += more
    return text.decode(errors="replace")


if __name__ == "__main__":
    sys.stdout.write(obstacle())
