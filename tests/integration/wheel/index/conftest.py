"""A wheelhouse, the index over it, a server of it, and a node that takes from there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import venv
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
from uv import find_uv_bin

from patchkit.wheel.index.write import write_index
from patchkit.wheel.wheelhouse.contents import add
from support.indexed import FACTS, NCCL, VLLM
from support.wheels import write_wheel


@pytest.fixture
def house(tmp_path):
    return tmp_path / "wheelhouse"


@pytest.fixture
def held(tmp_path):
    """Put a wheel into a wheelhouse: ``held("1.0", project="leaf")``."""

    def put(version, *, dir="wheelhouse", **more):
        return add(tmp_path / dir, write_wheel(tmp_path / "made", version, **more), FACTS)

    return put


@pytest.fixture
def world(held):
    """A vLLM and an NCCL that were built here, and what they need."""
    held(VLLM, project="vllm", requires=["torch==2.11.0", "leaf_thing>=1"])
    held(NCCL)
    held("2.11.0", project="torch", requires=["nvidia-nccl-cu13==2.28.9"])
    held("1.0", project="Leaf.Thing", tag="py3-none-any", python=">=3.8, <4")


@pytest.fixture
def site(tmp_path):
    return tmp_path / "site"


@pytest.fixture
def index(house, site):
    """Write the index of ``wheelhouse``, or of others: ``index("old", "new")``."""
    return lambda *names: write_index(site, [house.with_name(name) for name in names] or [house])


@pytest.fixture
def served(tmp_path):
    """Serve a folder by Python's own server: ``served("site")`` has ``url`` and ``asked()``."""
    with contextlib.ExitStack() as running:

        def start(folder):
            log = tmp_path / f"{folder}.log"
            command = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1"]
            command += ["--directory", folder, "0"]
            errors = running.enter_context(log.open("w"))
            process = running.enter_context(
                subprocess.Popen(
                    command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors, text=True
                )
            )
            running.callback(process.terminate)
            port = re.search(r"port (\d+)", process.stdout.readline())[1]

            def asked():
                paths = re.findall(r'"GET (\S+) HTTP/1.1" 200', log.read_text())
                return [unquote(path).rpartition("/")[2] or path for path in paths]

            return SimpleNamespace(url=f"http://127.0.0.1:{port}/simple/", asked=asked)

        yield start


@pytest.fixture
def node(tmp_path):
    """An empty environment: ``node.pip("install", ...)``, ``node.uv(...)``, ``node.has()``."""
    place = tmp_path / "node"
    venv.create(place, with_pip=False)
    program = str(place / "bin/python")
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    settings = {
        **alone,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
        "PIP_NO_COMPILE": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "UV_NO_CONFIG": "1",
        "UV_CACHE_DIR": str(tmp_path / "uv"),
        "UV_PYTHON": program,
    }

    def run(command, rc):
        done = subprocess.run(command, env=settings, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == rc, done.stdout + done.stderr
        return done.stdout + done.stderr

    def pip(*arguments, rc=0):
        return run([sys.executable, "-m", "pip", "--python", program, *map(str, arguments)], rc)

    def uv(*arguments, rc=0):
        return run([find_uv_bin(), "pip", *map(str, arguments)], rc)

    def has():
        found = {}
        for home in place.glob("lib/python*/site-packages/*.dist-info"):
            name, version = re.findall(
                r"^(?:Name|Version): (.+)", (home / "METADATA").read_text(), re.MULTILINE
            )
            found[name] = version
        return found

    def clear():
        for home in place.glob("lib/python*/site-packages"):
            shutil.rmtree(home)
            home.mkdir()

    return SimpleNamespace(pip=pip, uv=uv, has=has, clear=clear)
