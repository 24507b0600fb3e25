"""Read from ``libraries.toml`` the purpose of each library in vLLM's wheels, and its releases."""

from __future__ import annotations

from functools import cache

from patchkit.frozen import frozen
from patchkit.recipes.vllm.build import ForReleases
from patchkit.records import RECIPES, read_toml
from patchkit.target import Target


@frozen
class KnownLibrary(ForReleases):
    """An entry of ``libraries.toml``, which describes the fields."""

    file: str
    devices: tuple[int, ...]
    code: str
    required: bool
    gives: str
    cost: str

    def used_on(self, target: Target) -> bool:
        return not self.devices or target.major in self.devices


@frozen
class LibraryTable:
    """The tables of ``libraries.toml``."""

    library: tuple[KnownLibrary, ...]
    around: tuple[str, ...]


@cache
def library_table() -> LibraryTable:
    """Return the contents of ``libraries.toml``, which is read once."""
    return read_toml(LibraryTable, RECIPES / "vllm" / "libraries.toml")
