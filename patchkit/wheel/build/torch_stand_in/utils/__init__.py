"""Say where the target's torch has its CMake packages."""

from __future__ import annotations

from .._target import TORCH, refuse_the_rest

cmake_prefix_path = str(TORCH / "share" / "cmake")
refuse_the_rest(__name__)
