"""Say what the target's ``torch/version.py`` says: version, CUDA, HIP, ROCm, XPU."""

from __future__ import annotations

from ._target import literals, refuse_the_rest

__version__: str
globals().update(literals("version.py"))
refuse_the_rest(__name__)
