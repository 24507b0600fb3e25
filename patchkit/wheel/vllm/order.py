"""Describe what `patchkit build vllm` is asked to build."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from patchkit.patching.fix import Request
from patchkit.wheel.build.toolchain import Toolchain
from patchkit.wheel.build.work import work_path


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOrder:
    """An order for vLLM: sources by their identity, the device, and the release of torch.

    ``extensions`` builds these alone (for tests), empty: all; ``without`` are optional extensions
    that are left out; ``given`` names sources of other projects, which may lie in ``mirror``, too;
    ``python`` has torch and what else builds run; by default that is an environment made of
    ``requirements``, by default the locked ones.
    """

    source: Path
    identity: str
    version: Version
    torch: str
    request: Request
    toolchain: Toolchain
    python: Path | None = None
    requirements: Path | None = None
    jobs: int
    given: Mapping[str, str] = field(default_factory=dict)
    mirror: Path | None = None
    offline: bool = False
    without: frozenset[str] = frozenset()
    extensions: frozenset[str] = frozenset()
    fresh: bool = False

    @property
    def across(self) -> bool:
        """Return whether it is built for another CPU than this one."""
        return self.toolchain.machine != platform.machine()

    @property
    def label(self) -> str:
        """Return the beginning of the wheel's local version."""
        target = self.request.target
        return f"{target.cuda_tag}.{target.name}{'.reduced' if self.extensions else ''}"

    @property
    def expected(self) -> str:
        """Return the wheel's file name, but for what only the build can tell."""
        version = f"{self.version.public}+{self.label}"
        # cp38-abi3, as upstream's wheels: one wheel for every later Python.
        return f"vllm-{version}-cp38-abi3-linux_{self.toolchain.machine}.whl"

    @property
    def work(self) -> Path:
        """Return the folder in which it is compiled."""
        parts = ("vllm", self.version.public, self.request.target.name, self.toolchain.machine)
        return work_path(*parts, reduced=bool(self.extensions))
