"""A virtual environment on a node in which vLLM seems to be installed: the program is the fake.

The package holds what patchkit reads of a release, from the release's own source archive, but
nothing that could be imported: which variables and flags it takes, and with which values.
"""

from __future__ import annotations

import json
import struct
import tarfile
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Protocol

from packaging.version import Version

from e2e.emulation.nodes import NodeError
from e2e.lifecycle.fake_vllm import VERSION
from e2e.lifecycle.nodes import HOME
from patchkit.follow import Completed
from patchkit.patching.recipe import load_recipe
from patchkit.recipes.vllm.build import recorded_needs
from patchkit.source.fetch import fetch
from patchkit.source.releases import read_lock
from support.wheels import write_wheel

VENV = f"{HOME}/.local/share/patchkit/venv"  # where `patchkit cluster install` makes it
_CUDA = "nvidia-cudnn-cu13==9.13.0.50"
PROGRAM = Path(__file__).with_name("fake_vllm.py")
# What says which variables and flags there are, and which values they take.
READ = (
    *(
        "envs.py",
        "config/*.py",
        "engine/*.py",
        "entrypoints/cli/*.py",
        "entrypoints/openai/*.py",
    ),
    *("model_executor/model_loader/__init__.py", "v1/attention/backends/registry.py"),
    *(
        "reasoning/__init__.py",
        "tool_parsers/__init__.py",
        "transformers_utils/config.py",
    ),
)


class User(Protocol):
    """A node on which commands are run as its user."""

    name: str

    def user(
        self, *words: str | Path, seconds: int = 30, input: bytes = b""
    ) -> Completed: ...


def install(node: User) -> None:
    """Make the environment there. Raises NodeError."""
    insist_user(node, "python3", "-m", "venv", "--without-pip", VENV)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = insist_user(node, f"{VENV}/bin/python", "-c", where).strip()
    unpack = 'cat > wheel.zip && python3 -m zipfile --extract wheel.zip "$0"'
    for wheel in made_wheels():
        insist_user(node, "sh", "-c", unpack, site, input=wheel)
    write(node, f"{VENV}/bin/vllm", f"#!{VENV}/bin/python\n{PROGRAM.read_text()}")
    insist_user(node, "chmod", "+x", f"{VENV}/bin/vllm")


def write(node: User, path: str, text: str) -> None:
    """Write a file there as the user. Raises NodeError."""
    script = 'mkdir -p "${0%/*}" && cat > "$0"'
    insist_user(node, "sh", "-c", script, path, input=text.encode() or b"\n")


def write_model(node: User, folder: str) -> None:
    """Write a model of one number. Raises NodeError."""
    header = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    size = struct.pack("<Q", len(header)).decode()
    write(node, f"{folder}/config.json", json.dumps(config))
    write(node, f"{folder}/model.safetensors", f"{size}{header}" + "\0" * 4)


def wheels(folder: Path, note: str = "", release: str = VERSION) -> list[Path]:
    """Write wheels of what `install` puts there; return their paths, vLLM's first.

    ``note`` is in them, so that they are others. torch is the one that the release needs; it needs
    a library, as one for CUDA does.
    """
    torch = str(recorded_needs(Version(release)).torch)
    program = PROGRAM.read_text().replace(VERSION, release)
    entry = f"[console_scripts]\nvllm = vllm.{PROGRAM.stem}:main\n"
    vllm = {
        **{
            path: data
            for path, data in _files(release).items()
            if path.startswith("vllm/")
        },
        f"vllm/{PROGRAM.name}": program.encode(),
        f"vllm-{release}.dist-info/entry_points.txt": entry.encode(),
    }
    # A torch without that library is one for CPUs alone.
    cuda = {"torch/__init__.py": b"", "torch/lib/libtorch_cuda.so": b""}
    library, _, version = _CUDA.partition("==")
    return [
        write_wheel(
            folder,
            each,
            project=project,
            files={**files, f"{project}/note.txt": note.encode()},
            requires=needs,
        )
        for project, each, files, needs in (
            ("vllm", release, vllm, [f"torch=={torch}"]),
            ("torch", torch, cuda, [_CUDA]),
            (library, version, {}, []),
        )
    ]


@cache
def made_wheels() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        return [path.read_bytes() for path in wheels(Path(folder))]


@cache
def _files(release: str = VERSION) -> Mapping[str, bytes]:
    """Return the packages; the release comes from the package index, once.

    Raises PatchkitError if it cannot be had.
    """
    recipe = load_recipe("vllm")
    archive = fetch(recipe.project, release, read_lock(recipe.home / "lock.toml"))
    files = {
        "vllm/__init__.py": f'__version__ = "{release}"\n'.encode(),
        "torch/__init__.py": b"",
    }
    with tarfile.open(archive) as source:
        for member in source:
            path = PurePosixPath(member.name).relative_to(f"vllm-{release}")
            if any(path.match(f"vllm/{each}") for each in READ):
                content = source.extractfile(member)
                assert content is not None
                files[str(path)] = content.read()
    return files


def insist_user(
    node: User, *words: str | Path, seconds: int = 30, input: bytes = b""
) -> str:
    done = node.user(*words, seconds=seconds, input=input)
    if done.trouble:
        raise NodeError(f"{node.name}: {done.trouble}")
    return done.output
