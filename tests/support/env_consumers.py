"""The programs that read env files, asked for what they read: shells, systemd and docker."""

import contextlib
import ctypes
import json
import os
import shutil
import socketserver
import subprocess
import threading
from functools import cache
from pathlib import Path

from support.local_server import QuietHandler

SHELLS = ("sh", "dash", "bash", "ksh", "mksh", "busybox", "zsh")


def shells():
    """Command lines of the POSIX shells that are installed."""
    for name in SHELLS:
        if path := shutil.which(name):
            more = {"busybox": ["sh"], "zsh": ["--emulate", "sh"]}.get(name, [])
            yield [path, *more]


def sourced(shell, path, *, exported=True):
    """What a file adds to the environment; without ``exported``, under ``set -a``."""
    script = '. "$1"' if exported else 'set -a; . "$1"; set +a'
    found = _environment(tuple(shell), f"{script};", path)
    return {name: found[name] for name in found.keys() - _by_itself(tuple(shell))}


@cache
def _by_itself(shell):
    """The names that a shell sets in an empty environment: PWD, and PATH or LOGNAME."""
    return {"_", *_environment(shell, "", "/")}


def _environment(shell, script, path):
    done = subprocess.run(
        [
            *shell,
            "-eu",
            "-c",
            f'{script} exec "$2" -0',
            "sh",
            str(path),
            shutil.which("env"),
        ],
        env={},
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    pairs = [item.split(b"=", 1) for item in done.stdout.split(b"\0") if item]
    return {name.decode(errors="replace"): value.decode() for name, value in pairs}


def systemd_library():
    """systemd's own code as a library, which systemd reads an EnvironmentFile= with; or None."""
    places = [*Path("/usr/lib").glob("systemd/libsystemd-shared-*.so")]
    places += Path("/usr/lib").glob("*/systemd/libsystemd-shared-*.so")
    return next(iter(places), None)


def read_by_systemd(path):
    """What a unit gets: its EnvironmentFile= parsed, and values dropped that are not valid."""
    library, texts = (
        ctypes.CDLL(str(systemd_library())),
        ctypes.POINTER(ctypes.c_char_p),
    )
    library.load_env_file.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.POINTER(texts),
    ]
    library.env_value_is_valid.argtypes = [ctypes.c_char_p]
    library.env_value_is_valid.restype = ctypes.c_bool
    found = texts()
    assert library.load_env_file(None, os.fsencode(path), ctypes.byref(found)) == 0
    pairs = {}
    while found and (item := found[len(pairs)]) is not None:
        name, value = item.split(b"=", 1)
        assert library.env_value_is_valid(value)
        pairs[name.decode()] = value.decode()
    return pairs


class _Daemon(QuietHandler):
    """As much of the Docker API as `docker create` asks for; keeps what it is sent."""

    def do_GET(self):
        self._answer(200, {})

    do_HEAD = do_GET

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append(json.loads(body))
        self._answer(201, {"Id": "1", "Warnings": []})

    def _answer(self, status, content):
        headers = {"Api_Version": "1.47", "Content_Type": "application/json"}
        self.send(status, json.dumps(content).encode(), **headers)


@contextlib.contextmanager
def docker(folder):
    """``read(path)``: what docker's command line sends its daemon for an --env-file."""
    place = folder / "docker.sock"
    with socketserver.ThreadingUnixStreamServer(str(place), _Daemon) as server:
        server.seen, server.daemon_threads = [], True
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def read(path, **environment):
            server.seen.clear()
            create = [
                "docker",
                "-H",
                f"unix://{place}",
                "create",
                "--env-file",
                str(path),
                "image",
            ]
            home = {"DOCKER_CONFIG": str(folder), "PATH": os.environ["PATH"]}
            done = subprocess.run(
                create, env={**home, **environment}, capture_output=True
            )
            assert (done.returncode, done.stderr) == (0, b"")
            (sent,) = server.seen
            return dict(item.split("=", 1) for item in sent["Env"] or () if "=" in item)

        yield read
        server.shutdown()
