"""Give way to the ``torch/version.py`` of the target, which is put in this place."""

from __future__ import annotations

__version__ = ""
