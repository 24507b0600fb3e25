"""Say where the target's torch is, and its CMake packages."""

from __future__ import annotations

import os
from pathlib import Path

# …/site-packages/torch of the target, as the installation wrote it beside this package.
TORCH = Path(os.fsdecode(Path(__file__).parents[1].joinpath("target").read_bytes()))
cmake_prefix_path = str(TORCH / "share" / "cmake")
