"""A real API server of Kubernetes on this machine: etcd, kube-apiserver and kubectl from PATH.

No kubelet and no controller: it takes objects or refuses them, as a cluster would.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time

PROGRAMS = ("etcd", "kube-apiserver", "kubectl")
SECONDS = 120


def missing():
    """Return which of the programs are not on PATH."""
    return [each for each in PROGRAMS if not shutil.which(each)]


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class KubeApi:
    """The server, from `with` to its end; ``kubectl("get", "ns")`` asks it."""

    def __init__(self, folder):
        self.folder = folder
        self.store, self.peer, self.port = _free_ports(3)
        self.processes = []

    def __enter__(self):
        own = self.folder
        subprocess.run(
            ["openssl", "genrsa", "-out", own / "sa.key", "2048"], check=True, capture_output=True
        )
        (own / "tokens.csv").write_text('token,admin,admin,"system:masters"\n')
        store = f"http://127.0.0.1:{self.store}"
        self._start(
            *("etcd", f"--data-dir={own / 'etcd'}", f"--listen-client-urls={store}"),
            *(
                f"--advertise-client-urls={store}",
                f"--listen-peer-urls=http://127.0.0.1:{self.peer}",
            ),
        )
        self._start(
            *("kube-apiserver", f"--etcd-servers={store}", "--bind-address=127.0.0.1"),
            *(f"--secure-port={self.port}", f"--cert-dir={own / 'certs'}"),
            *(f"--service-account-key-file={own / 'sa.key'}", "--allow-privileged=true"),
            *(f"--service-account-signing-key-file={own / 'sa.key'}",),
            "--service-account-issuer=https://kubernetes.default.svc",
            *("--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=AlwaysAllow"),
            *(f"--token-auth-file={own / 'tokens.csv'}", "--advertise-address=127.0.0.1"),
            # A controller makes accounts; and no tolerations beside those that are asked for.
            "--disable-admission-plugins=ServiceAccount,DefaultTolerationSeconds",
        )
        deadline = time.monotonic() + SECONDS
        while self.kubectl("get", "namespace", "default", check=False).returncode:
            ended = [each.args[0] for each in self.processes if each.poll() is not None]
            assert not ended, (ended, (own / f"{ended[0]}.log").read_text()[-2000:])
            assert time.monotonic() < deadline, "the API server does not answer"
            time.sleep(0.5)
        return self

    def __exit__(self, *_):
        for each in reversed(self.processes):
            each.terminate()
            each.wait(SECONDS)

    def _start(self, *command):
        with (self.folder / f"{command[0]}.log").open("wb") as log:
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def kubectl(self, *words, check=True, text=""):
        done = subprocess.run(
            [
                *("kubectl", f"--server=https://127.0.0.1:{self.port}", "--token=token"),
                *("--insecure-skip-tls-verify", f"--cache-dir={self.folder / 'kube'}", *words),
            ],
            input=text,
            capture_output=True,
            text=True,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder)},
        )
        assert not check or done.returncode == 0, done.stderr
        return done
