"""Bring together what a fix of NCCL is written with."""

from patchkit.recipes.kit import *
from patchkit.recipes.nccl.build_files import (
    COMMON_MK,
    ROOT_FILE,
    configured_archs,
    gencodes,
    make_flags,
)
