"""A fresh machine: a distribution with Python, pip and git, where README's commands have to pass.

    nox -s fresh -- [--ordinary] [--with PACKAGE,...] [PYTEST-ARGUMENTS ...]
    nox -s fresh -- --ordinary --ubuntu    # README's blocks alone, on Ubuntu 24.04

mmdebstrap unpacks it from what this machine's apt is configured for; the committed HEAD is cloned
into it, and README's blocks and tests run there as root, or as an ordinary user whose umask is 0002
and whose PATH has no /usr/sbin, in mount and PID namespaces of their own, with nothing of this
machine but its network, the configuration of pip, its certificates and two caches. What of a block
needs a Spark is shown and left out (tests/support/readme.py).
``python -m e2e.proofs.fresh --obstacle [--ubuntu]`` prints what is in the way here, or nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.emulation import nodes
from support import readme

ROOT = Path(__file__).parents[3]
PACKAGES = ("python3-venv", "python3-pip", "git", "ca-certificates")
# Debian 12 has Python 3.11.2, without tarfile's filters: pyproject.toml wants 3.11.4 or later.
TOO_OLD = {"bookworm": "trixie"}
SOURCES = (
    "sources.list",
    "sources.list.d/debian.sources",
    "sources.list.d/ubuntu.sources",
)
UBUNTU_PORTS = "http://ports.ubuntu.com/ubuntu-ports"
UBUNTU, NOBLE = (
    "http://archive.ubuntu.com/ubuntu",
    "noble",
)  # 24.04: DGX OS is made of it
# Another distribution has no key of Ubuntu: the package that holds it, by its sha256.
UBUNTU_KEYS = (
    "pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb",
    "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8",
)
CERTIFICATES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
INHERITED = re.compile(
    r"PIP_\w+|\w+_proxy|REQUESTS_CA_BUNDLE|SSL_CERT_FILE", re.IGNORECASE
)
DEVICES = (
    "null",
    "zero",
    "full",
    "random",
    "urandom",
)  # bound: not every namespace makes them
CACHES = ("pip", "patchkit")
CLONE = Path("/srv/patchkit")  # not in /root: some tests read it as nobody
MACHINES = Path("/srv/machines")  # that stand for Sparks
PLAIN = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}
SPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child")


@dataclass(frozen=True, kw_only=True)
class Account:
    """Who runs README's commands inside; its ``number`` is both user and group."""

    number: int
    home: str
    path: str
    umask: int

    def words(self) -> list[str]:
        """Return the words that become this account, before a command."""
        change = [
            "setpriv",
            f"--reuid={self.number}",
            f"--regid={self.number}",
            "--clear-groups",
        ]
        return [*change, "env", f"HOME={self.home}", f"PATH={self.path}"]


ROOT_ACCOUNT = Account(number=0, home="/root", path=PLAIN["PATH"], umask=0o022)
# As `su - NAME` gives it on Debian to a user who has a group of the same name.
ORDINARY = Account(
    number=1000, home="/home/eva", path="/usr/local/bin:/usr/bin:/bin", umask=0o002
)


def obstacle(*programs: str) -> str:
    """Return why no fresh machine can be made here; empty if nothing is in the way."""
    without_sources = "" if _sources() else "apt has no sources of Debian or Ubuntu"
    return nodes.obstacle("mmdebstrap", *programs) or without_sources


def ubuntu_obstacle() -> str:
    """Return why no fresh Ubuntu can be made here; empty if nothing is in the way."""
    try:
        urllib.request.urlopen(f"{UBUNTU}/dists/{NOBLE}/Release", timeout=30).close()
    except OSError as error:
        return f"the archive of Ubuntu is not reached: {error}"
    return obstacle("dpkg-deb")


def unpack(
    root: Path, packages: Iterable[str], *options: str, cpu: str = "", release: str = ""
) -> None:
    """Unpack packages into a folder, of another CPU if Debian's name of one is given.

    ``release`` is the distribution's, by default one whose Python is new enough for patchkit.

    Raises CalledProcessError after mmdebstrap said why.
    """
    release = release or suite()
    acquire = subprocess.run(
        ["apt-config", "dump", "Acquire"], capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "options").write_bytes(acquire.stdout)  # proxies, for one
        named = [f"--aptopt={scratch}/options", f"--include={','.join(packages)}"]
        if cpu:
            named.append(f"--architectures={cpu}")
        mirrors = []
        for number, text in enumerate(_sources(release)):
            mirrors.append(f"{scratch}/{number}")
            if (
                cpu and "ubuntu" in text
            ):  # its servers for other CPUs than x86 are others
                text = re.sub(
                    r"(?m)^(URIs: |deb (?:\[.*?\] )?)\S+", rf"\1{UBUNTU_PORTS}", text
                )
            Path(mirrors[-1]).write_text(text)
        command = ["mmdebstrap", "--mode=root", "--quiet", *named, *options]
        subprocess.run([*command, release, str(root), *mirrors], check=True)


def unpack_ubuntu(root: Path, packages: Iterable[str]) -> None:
    """Unpack packages of Ubuntu 24.04 into a folder, on any distribution.

    Raises OSError if its archive is not reached, ValueError if the package with its keys is another
    one, CalledProcessError after mmdebstrap said why.
    """
    path, digest = UBUNTU_KEYS
    with tempfile.TemporaryDirectory() as scratch:
        keys = Path(scratch) / "keys.deb"
        with urllib.request.urlopen(f"{UBUNTU}/{path}", timeout=30) as answer:
            keys.write_bytes(answer.read(1 << 20))
        if hashlib.sha256(keys.read_bytes()).hexdigest() != digest:
            raise ValueError(f"{path} is not the package whose sha256 is {digest}")

        subprocess.run(["dpkg-deb", "--extract", str(keys), scratch], check=True)
        ring = f"{scratch}/usr/share/keyrings/ubuntu-archive-keyring.gpg"
        mirrors = [
            f"deb [signed-by={ring}] {UBUNTU} {NOBLE}{pocket} main universe"
            for pocket in ("", "-updates")
        ]
        named = ["--variant=minbase", f"--include={','.join(packages)}"]
        command = ["mmdebstrap", "--mode=root", "--quiet", *named]
        subprocess.run([*command, NOBLE, str(root), *mirrors], check=True)


def suite() -> str:
    """Return the release of the distribution that is unpacked: one with a Python new enough."""
    name = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    return TOO_OLD.get(name, name)


def _sources(release: str = "") -> list[str]:
    """Return the distribution's own sources of apt here, of this release of it; nobody else's."""
    own = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    files = [Path("/etc/apt") / name for name in SOURCES]
    texts = [
        re.sub(rf"\b{own}\b", release or suite(), file.read_text())
        for file in files
        if file.is_file()
    ]
    return [
        text
        for text in texts
        if own and re.search(r"^(deb|Types:) ", text, re.MULTILINE)
    ]


def run(root: Path, command: str, account: Account) -> int:
    """Run a script of sh in a clone of the repository there. Its exit status."""
    # What pip needs here in order to reach its index.
    config = (
        "/etc/pip.conf",
        "/etc/xdg/pip/pip.conf",
        "~/.config/pip/pip.conf",
        "~/.pip/pip.conf",
    )
    named = ["/etc/ssl/certs/ca-certificates.crt", *map(os.environ.get, CERTIFICATES)]
    home = account.home.lstrip("/")
    for name in (*config, *filter(None, named)):
        place = root / name.replace("~", home).lstrip("/")
        if Path(name).expanduser().is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(name).expanduser(), place)
    clone = (
        "clone",
        "--quiet",
        "--no-hardlinks",
        str(ROOT),
        str(root / CLONE.relative_to("/")),
    )
    subprocess.run(["git", *clone], check=True, umask=account.umask)
    binds = _caches(root / home, account)
    if account.number:
        _give(root, account)
    inside = f"umask {account.umask:04o} && cd {CLONE} && python3 --version\n{command}"
    become = shlex.join([*account.words(), "sh", "-euc", inside])
    script = entering(root, binds, f"exec {become}")
    given = {
        name: value for name, value in os.environ.items() if INHERITED.fullmatch(name)
    }
    done = subprocess.run(
        [*SPACES, "sh", "-c", script], env={**given, **PLAIN}, check=False
    )
    return done.returncode


def _caches(home: Path, account: Account) -> dict[Path, str]:
    """Return what of this machine's caches is bound, so that releases come over the network once.

    An ordinary user may not write to those of root, and gets a copy.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    for name in CACHES:
        (caches / name).mkdir(parents=True, exist_ok=True)
    if not account.number:
        return {caches / name: f"{account.home}/.cache/{name}" for name in CACHES}
    (home / ".cache").mkdir(parents=True)
    copied = [str(caches / name) for name in CACHES]
    copy = ["cp", "--archive", "--reflink=auto", *copied, str(home / ".cache")]
    subprocess.run(copy, check=True)
    return {}


def _give(root: Path, account: Account) -> None:
    """Make an account there by its number, and give it its home and the clone."""
    name = Path(account.home).name
    for file, line in {
        "passwd": f"{name}:x:{account.number}:{account.number}::{account.home}:/bin/sh\n",
        "group": f"{name}:x:{account.number}:\n",
    }.items():
        with (root / "etc" / file).open("a") as table:
            table.write(line)
    places = [
        str(root / place.lstrip("/")) for place in (account.home, str(CLONE.parent))
    ]
    subprocess.run(
        ["chown", "-R", f"{account.number}:{account.number}", *places], check=True
    )


def entering(root: Path, binds: Mapping[Path, str], inside: str) -> str:
    """Return a script that runs another one with a folder as its file system.

    It needs mount and PID namespaces of its own. ``binds`` are files and folders of this machine,
    and where they are to be inside.
    """
    lines = [
        "set -eu",
        # pivot_root(2) takes a mount point alone, so the folder is mounted on itself.
        f"mount --bind {shlex.quote(str(root))} {shlex.quote(str(root))}",
        f"cd {shlex.quote(str(root))}",
        "mount -t proc proc proc",
        "mount -t sysfs -o ro sysfs sys",
        f"mkdir -p mnt dev/shm dev/pts && touch {' '.join(f'dev/{name}' for name in DEVICES)}",
        *(f"mount --bind /dev/{name} dev/{name}" for name in DEVICES),
        "mount -t tmpfs -o mode=1777 tmpfs dev/shm",
        "mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts",
        "touch dev/ptmx && mount --bind dev/pts/ptmx dev/ptmx",
    ]
    for here, path in binds.items():
        there = Path(path.lstrip("/"))
        made = f"mkdir -p {there.parent} && touch" if here.is_file() else "mkdir -p"
        lines.append(f"{made} {there} && mount --bind {shlex.quote(str(here))} {there}")
    inside = f"umount -l /mnt\n{inside}"
    # Not chroot alone: in one, nobody can make further namespaces.
    lines.append(f"pivot_root . mnt && exec chroot . sh -euc {shlex.quote(inside)}")
    return "\n".join(lines)


def blocks() -> str:
    """Return README's two blocks, and those by hand."""
    machines = f"""\
from pathlib import Path
from support import hosts
for name, node in {[*readme.MACHINES.values(), (readme.BARE, 0), (readme.BARE, 1)]}:
    hosts.build(Path({str(MACHINES)!r}), name, node=node)"""
    return f"""\
PYTHONPATH=tests python3 -c {shlex.quote(machines)}
({readme.script(readme.ONE, MACHINES)}
)
(. .venv/bin/activate
{readme.script(readme.TWO, MACHINES)}
{readme.script(readme.BY_HAND, MACHINES)}
)"""


def tests(arguments: list[str]) -> str:
    """Return README's tests, with arguments for pytest."""
    return f"{readme.tests_command()} -- {shlex.join(arguments)}".removesuffix(" -- ")


def main() -> int:
    """Make a fresh machine, and return the exit status of README's commands in it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--obstacle", action="store_true")
    parser.add_argument("--ordinary", action="store_true")
    parser.add_argument("--ubuntu", action="store_true")
    parser.add_argument("--with", dest="packages", default="", metavar="PACKAGE,...")
    options, arguments = parser.parse_known_args()
    if options.obstacle:
        sys.stdout.write(ubuntu_obstacle() if options.ubuntu else obstacle())
        return 0
    extra = [*filter(None, options.packages.split(","))]
    account = ORDINARY if options.ordinary else ROOT_ACCOUNT
    with tempfile.TemporaryDirectory(
        prefix="patchkit-fresh-", dir="/var/tmp"
    ) as folder:
        root = Path(folder) / "root"
        who = "an ordinary user" if options.ordinary else "root"
        if options.ubuntu:
            unpack_ubuntu(root, [*PACKAGES, *extra])
            sys.stderr.write(f"{NOBLE}, {who}: README's blocks\n")
            return run(root, blocks(), account)

        unpack(root, [*PACKAGES, *extra], "--variant=minbase")
        sys.stderr.write(
            f"{suite()}, {who}: README's blocks, then {readme.tests_command()}\n"
        )
        return run(root, f"{blocks()}\n{tests(arguments)}", account)


if __name__ == "__main__":
    sys.exit(main())
