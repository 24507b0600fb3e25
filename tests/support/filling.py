"""Share among tests of a fill the wheels that there are, and the reading of a wheelhouse."""

import json
import os
import sys

from patchkit.wheel.wheelhouse.storage import load_manifest
from patchkit.wheel.wheelhouse.verify import check_files

OURS = "2.28.9+gb10.abc123"
FACTS = {"target": "gb10"}
TORCH = {"torch/lib/libtorch_cuda.so": b"", "torch/__init__.py": b""}
THIS = f"{sys.version_info[0]}.{sys.version_info[1]}"
ALL = ["for-new==1.0", "leaf==1.0", "nvidia-cudnn-cu13==9.0"]
ALL += [
    f"nvidia-nccl-cu13=={OURS}",
    "only-there==1.0",
    "torch==2.11.0",
    "typing-thing==2.0",
    "vllm==0.25.1",
]
LOCK = [
    "--find-links",
    "wheelhouse",
    "--require-hashes",
    "-r",
    "wheelhouse/requirements.txt",
]


def fill(cli, offered, *arguments, **how):
    """Run `patchkit wheelhouse fill`, from a folder alone, whatever pip is configured for."""
    alone = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": str(offered),
        "PIP_NO_INDEX": "1",
    }
    return cli("wheelhouse", "fill", *arguments, env=alone, **how)


def contents(house):
    return {path.name: path.read_bytes() for path in house.iterdir() if path.is_file()}


def held(house):
    return [str(entry.name.version) for entry in load_manifest(house).wheels]


def kinds(house):
    return [(finding.where, finding.kind.exit_code) for finding in check_files(house)]


def locked(house):
    lines = (house / "requirements.txt").read_text().splitlines()
    return [line.partition(" ")[0] for line in lines if not line.startswith("#")]


def installed(node):
    return sorted(
        f"{e['name']}=={e['version']}".lower()
        for e in json.loads(node("list", "--format=json"))
    )
