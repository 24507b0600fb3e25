"""A real sshd on loopback, and an ssh that knows it: its key, its port, and a key that it takes.

``ssh`` of PATH is the system's, with a configuration of its own, as a user's ~/.ssh/config would
be; a program under test finds it by PATH alone.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from support import write_files

SSHD = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")


def obstacle() -> str:
    """Return why there can be no sshd here, "" if there can."""
    missing = [name for name in ("ssh", "ssh-keygen") if not shutil.which(name)]
    if missing or not SSHD:
        return f"{(missing or ['sshd'])[0]} is not installed (openssh-client, openssh-server)"
    return ""


@contextlib.contextmanager
def ssh_server(folder: Path, *names: str, homes: dict[str, Path] | None = None):
    """Start sshd; yield the PATH in which ssh reaches it by these names.

    A name in ``homes`` leads to a port of its own, where that folder is the home, and where the
    same ``ssh`` is found: a node that reaches the others, with files of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("host", "user"):
        words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name)
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    port = free_port()
    server_file = folder / "sshd_config"
    server_file.write_text(
        f"ListenAddress 127.0.0.1\nListenAddress 127.0.0.2\nPort {port}\n"
        f"HostKey {folder}/host\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/authorized\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        f"SetEnv PATH={folder}/bin:{os.environ['PATH']}\n"  # there, too, ssh knows the names
    )
    ports = {name: free_port() for name in homes or {}}
    with server_file.open("a") as file:
        file.writelines(f"Port {each}\n" for each in ports.values())
        for name, home in (homes or {}).items():
            file.write(
                f'Match LocalPort {ports[name]}\n SetEnv "HOME={home}" '
                f'"PATH={folder}/bin:{os.environ["PATH"]}" "XDG_RUNTIME_DIR={home}"\n'
            )
    key = (folder / "host.pub").read_text().split()[:2]
    (folder / "known").write_text(
        "".join(f"[127.0.0.1]:{n} {' '.join(key)}\n" for n in (port, *ports.values()))
    )
    (folder / "config").write_text(
        "".join(f"Host {name}\n Port {n}\n" for name, n in ports.items())
        + f"Host {' '.join(names)}\n HostName 127.0.0.1\n Port {port}\n User {getpass.getuser()}\n"
        f" IdentityFile {folder}/user\n IdentitiesOnly yes\n"
        f" UserKnownHostsFile {folder}/known\n StrictHostKeyChecking yes\n"
    )
    program = f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n'
    binaries = write_files(folder / "bin", {"ssh": program}, mode=0o755)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where it gives rights up
    log = folder / "sshd.log"
    server = subprocess.Popen([SSHD, "-D", "-f", str(server_file), "-E", str(log)])
    try:
        for _ in range(100):
            assert server.poll() is None, log.read_text()
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 1),
            ):
                break
            time.sleep(0.05)
        yield f"{binaries}:{os.environ['PATH']}"
    finally:
        server.terminate()
        server.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
