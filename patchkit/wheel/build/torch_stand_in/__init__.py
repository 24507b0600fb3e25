"""Answer in the place of torch what vLLM's setup.py and CMake ask of it, for another CPU.

``patchkit.wheel.build.torch_toolkit`` copies this folder into a build environment, as the package
``torch``, with the target's own ``version.py``. Nothing else of the target's torch is run.
"""

from __future__ import annotations

from . import utils as utils
from .version import __version__ as __version__

__file__ = str(
    utils.TORCH / "__init__.py"
)  # 0.25.1's CMake looks for libgomp beside it


def compiled_with_cxx11_abi() -> bool:
    """Return which ABI of libstdc++ the target's torch has: since 2.7 always the new one."""
    return True
