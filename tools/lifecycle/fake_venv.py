"""A virtual environment on a node in which vLLM seems to be installed: the program is the fake."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tools.emulation.nodes import NodeError
from tools.lifecycle.fake_vllm import VERSION
from tools.lifecycle.nodes import HOME, SystemdNode

VENV = f"{HOME}/venv"
SETTINGS = "fake.env"  # beside the program
INSTALLED = {"vllm": VERSION, "torch": "2.11.0"}
PROGRAM = Path(__file__).with_name("fake_vllm.py")


def install(node: SystemdNode, venv: str = VENV, **settings: object) -> None:
    """Make the environment there; raises NodeError. ``settings`` are as for `change`."""
    made = node.user("python3", "-m", "venv", "--without-pip", venv)
    packages = node.user(
        f"{venv}/bin/python", "-c", "import sysconfig as s; print(s.get_path('purelib'))"
    )
    if made.trouble or packages.trouble:
        raise NodeError(f"{node.name}: {venv}: {made.trouble or packages.trouble}")
    site = packages.output.strip()
    for path, text in files(venv, site).items():
        write(node, path, text)
    node.user("chmod", "+x", f"{venv}/bin/vllm")
    change(node, venv, **settings)


def change(node: SystemdNode, venv: str = VENV, **settings: object) -> None:
    """Set what the next start does, ``LOAD=0.5, FAIL="CUDA error"``; all others as by default."""
    text = "".join(f"FAKE_{name}={value}\n" for name, value in settings.items())
    write(node, f"{venv}/bin/{SETTINGS}", text)


def files(venv: str, site: str) -> Mapping[str, str]:
    """Return what is in the environment, by path."""
    found = {f"{venv}/bin/vllm": f"#!{venv}/bin/python\n{PROGRAM.read_text()}"}
    for name, version in INSTALLED.items():
        about = f"{site}/{name}-{version}.dist-info"
        record = f"{name}/__init__.py,,\n{name}-{version}.dist-info/METADATA,,\n"
        found |= {
            f"{about}/METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n",
            f"{about}/RECORD": record,
            f"{about}/INSTALLER": "pip\n",
            f"{site}/{name}/__init__.py": f'__version__ = "{version}"\n',
        }
    return found


def write(node: SystemdNode, path: str, text: str) -> None:
    """Write a file there as the user. Raises NodeError."""
    script = 'mkdir -p "${0%/*}" && cat > "$0"'
    done = node.user("sh", "-c", script, path, input=text.encode() or b"\n")
    if done.trouble:
        raise NodeError(f"{node.name}: {path}: {done.trouble}")
