"""How tests build libnccl: from a small stand-in, below a folder that they name."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

SMALL = Path(__file__).with_name("data") / "nccl_small"
VERSION = "2.27.7"
HERE = platform.machine()
QUIET = {"CCACHE_DISABLE": "1"}
PATCHKIT = [
    sys.executable,
    "-c",
    """\
import sys
from pathlib import Path
from patchkit.wheel import work
work.WORK = Path(sys.argv.pop(1))
from patchkit.cli import main
main()
""",
]
