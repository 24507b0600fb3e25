"""Who knows whom by ssh: host keys that are known before a node boots, one key pair for the user.

Nobody has to accept a host key blindly: `known_hosts` holds the real ones, under every name and
address that a node has.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.lifecycle.rootfs import USER
from e2e.lifecycle.wiring import lan_ip


@dataclass(frozen=True)
class SshKeys:
    """Keys in a folder: `id_ed25519` of the user, `NAME` of each host, both with `.pub`."""

    folder: Path

    @classmethod
    def made(cls, folder: Path, hosts: Iterable[str]) -> SshKeys:
        """Return new keys for these hosts and for the user."""
        folder.mkdir(parents=True, mode=0o700)
        for name in ("id_ed25519", *hosts):
            words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", folder / name)
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
        return cls(folder)

    def host(self, name: str) -> dict[str, str]:
        """Return the files of a node's sshd, by path."""
        path = "/etc/ssh/ssh_host_ed25519_key"
        return {path: self._text(name), f"{path}.pub": self._text(f"{name}.pub")}

    def user(self, names: Mapping[str, Iterable[str]]) -> dict[str, str]:
        """Return what belongs into a user's `.ssh`, by name; ``names`` are those of each host."""
        known = (f"{','.join(each)} {self._text(f'{host}.pub')}" for host, each in names.items())
        return {
            "id_ed25519": self._text("id_ed25519"),
            "id_ed25519.pub": self._text("id_ed25519.pub"),
            "authorized_keys": self._text("id_ed25519.pub"),
            "known_hosts": "".join(known),
        }

    def _text(self, name: str) -> str:
        return (self.folder / name).read_text()


def config(numbers: Mapping[str, int]) -> str:
    """Return the ssh configuration of somebody with another user name than on the nodes."""
    hosts = (f"Host {name}\n  HostName {lan_ip(n)}\n" for name, n in numbers.items())
    return "".join(f"{host}  User {USER}\n" for host in hosts)


def put(ssh: Path, files: Mapping[str, str], owner: int) -> None:
    """Write a user's `.ssh` as ssh wants it: nobody else may read it."""
    ssh.mkdir(mode=0o700, exist_ok=True)
    for name, text in files.items():
        (ssh / name).write_text(text)
        (ssh / name).chmod(0o600)
    for path in (ssh, *ssh.iterdir()):
        os.chown(path, owner, owner)
