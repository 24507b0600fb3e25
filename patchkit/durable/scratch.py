"""Make temporary folders that no interrupt leaves behind."""

from __future__ import annotations

import tempfile

from patchkit.durable.signals import deferred


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A folder for a block. An interrupt waits while it is made, and while it is removed."""

    def __init__(self) -> None:
        with deferred():
            super().__init__(prefix="patchkit-")

    def cleanup(self) -> None:
        """Remove it; ``with`` calls this at the end of the block."""
        with deferred():
            super().cleanup()
