"""The file system that all nodes begin with: this machine's distribution, systemd, sshd, Python.

mmdebstrap unpacks it once; it is kept by a digest of what it is made of. Nodes are overlays of it.
``python -m e2e.lifecycle.rootfs`` prints what is in the way on this machine, or nothing.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from e2e.emulation import nodes, wires
from e2e.proofs import fresh

PACKAGES = (
    *(
        "systemd",
        "systemd-sysv",
        "dbus",
        "dbus-user-session",
        "libpam-systemd",
        "polkitd",
    ),
    *("openssh-server", "openssh-client", "rsync", "curl", "ca-certificates", "procps"),
    *("iproute2", "iputils-ping", "python3", "python3-venv", "libnuma1", "libgomp1"),
    *("docker.io", "docker-registry", "podman", "crun", "uidmap"),
)
USER, UID = "spark", 1000
REGISTRY = f"{wires.lan_ip(1)}:5000"
# Stands for both OCI runtimes: not every machine underneath lets a limit be raised.
RUNTIME = """\
#!/usr/bin/python3
import json, os, resource, sys
if found := {"--bundle", "--process"} & {*sys.argv}:  # --process: of `exec`
    path = sys.argv[sys.argv.index(found.pop()) + 1]
    path += "/config.json" * os.path.isdir(path)
    with open(path) as file:
        config = json.load(file)
    for limit in config.get("process", config).get("rlimits", ()):
        most = resource.getrlimit(getattr(resource, limit["type"]))[1]
        if most != resource.RLIM_INFINITY:
            limit["hard"], limit["soft"] = min(limit["hard"], most), min(limit["soft"], most)
    with open(path, "w") as file:
        json.dump(config, file)
os.execv(__file__ + ".real", [__file__ + ".real", *sys.argv[1:]])
"""
# Run in the new file system. Host keys and the machine's id are each node's own. Images are in
# memory, as /home is. A container may mount /proc only where one is whole, and nspawn's is not.
# podman stays in a unit's control group if all that /proc names are the user's; cgroup v1's are /.
FURNISH = f"""\
set -eu
for each in runc crun; do
  place=$(command -v $each)
  mv "$place" "$place.real"
  cat > "$place" <<'END'
{RUNTIME}END
  chmod +x "$place"
done
mkdir -p /etc/docker
echo '{{"data-root": "/home/docker", "insecure-registries": ["{REGISTRY}"]}}' \
  > /etc/docker/daemon.json
cd /etc/containers
printf '[[registry]]\nlocation = "{REGISTRY}"\ninsecure = true\n' > registries.conf.d/lab.conf
printf '[storage]\ndriver = "overlay"\n' > storage.conf
echo 'proc /run/proc proc defaults' >> /etc/fstab
echo 'z /sys/fs/cgroup - {USER}' > /etc/tmpfiles.d/cgroup.conf
useradd --create-home --uid {UID} --shell /bin/bash {USER}
install -d -o {USER} -g {USER} -m 700 /home/{USER}/.ssh
mkdir -p /var/lib/systemd/linger /var/log/journal
touch /var/lib/systemd/linger/{USER}
usermod --append --groups docker {USER}
rm -f /etc/ssh/ssh_host_* /etc/hostname /etc/machine-id /etc/resolv.conf
echo 'PasswordAuthentication no' > /etc/ssh/sshd_config.d/keys.conf
systemctl --quiet enable systemd-networkd ssh
systemctl --quiet disable systemd-networkd-wait-online apt-daily.timer apt-daily-upgrade.timer
systemctl --quiet disable docker.service containerd.service docker-registry.service
systemctl --quiet mask systemd-resolved e2scrub_reap fstrim.timer
"""


def obstacle() -> str:
    """Return why no such nodes can be made here; empty if nothing is in the way."""
    if found := fresh.obstacle("systemd-nspawn", "ssh-keygen", "rsync"):
        return found
    if not os.access("/sys/fs/cgroup", os.W_OK):
        return "/sys/fs/cgroup is not writable: nodes need control groups of their own"
    return ""


def ready(cache: Path, extra: Sequence[str] = ()) -> Path:
    """Return the file system with these packages, too; it is made if it is not there.

    Raises CalledProcessError after mmdebstrap said why.
    """
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    packages = sorted({*PACKAGES, *extra})
    made_of = "\n".join([release, platform.machine(), *packages, FURNISH])
    root = cache / f"root-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    if not root.is_dir():
        begun = cache / f"{root.name}.{os.getpid()}"
        begun.mkdir(parents=True)
        try:
            options = ("--variant=minbase", '--aptopt=Apt::Install-Recommends "false"')
            fresh.unpack(begun, packages, *options, release=release)
            env = {"PATH": nodes.SYSTEM_PATH, "LANG": "C.UTF-8"}
            subprocess.run(["chroot", begun, "sh", "-c", FURNISH], check=True, env=env)
            begun.rename(root)
        finally:
            shutil.rmtree(begun, ignore_errors=True)
    return root


if __name__ == "__main__":
    sys.stdout.write(obstacle())
