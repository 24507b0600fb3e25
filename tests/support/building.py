"""How tests build libnccl and vLLM: from small stand-ins, below a folder that they name."""

import platform
import sys
from pathlib import Path

_DATA = Path(__file__).parents[1] / "data"
SMALL = _DATA / "nccl_small"
VERSION = "2.27.7"
SMALL_VLLM = _DATA / "vllm_small"
VLLM_VERSION, TORCH = "0.27.99", "2.15.0"
HERE = platform.machine()
QUIET = {"CCACHE_DISABLE": "1"}
PATCHKIT = [
    sys.executable,
    "-c",
    """\
import sys
from pathlib import Path
from patchkit.wheel.build import machine
machine.WORK = Path(sys.argv.pop(1))
from patchkit.cli import main
main()
""",
]


def wheels(house):
    """What is in a wheelhouse, half-written wheels under any name included."""
    if not house.exists():
        return []
    assert not [
        path
        for path in house.rglob("*")
        if path.name.endswith((".part", ".tmp", ".new"))
    ]
    return sorted(house.glob("*.whl"))
