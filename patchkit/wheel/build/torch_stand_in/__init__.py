"""Answer in the place of torch what vLLM's setup.py and CMake ask of it, for another CPU.

``patchkit.wheel.build.cross_torch`` copies this folder into a build environment, as the package
``torch``. Nothing of the target's torch is run or loaded: its files are read.
"""

from __future__ import annotations

from . import utils as utils
from ._target import TORCH, refuse_the_rest, returned
from .version import __version__ as __version__

__file__ = str(TORCH / "__init__.py")  # 0.25.1's CMake looks for libgomp beside it
refuse_the_rest(__name__)


def compiled_with_cxx11_abi() -> bool:
    """Return which ABI of libstdc++ the target's torch has: what its own function returns."""
    return bool(returned("__init__.py", "compiled_with_cxx11_abi"))
