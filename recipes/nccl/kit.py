"""Bring together what a fix of NCCL is written with."""

from __future__ import annotations

from patchkit.recipes.kit import *
from patchkit.recipes.nccl.build_files import (
    COMMON_MK,
    ROOT_FILE,
    SOURCE_FILE,
    configured,
    gencodes,
    make_flags,
)
