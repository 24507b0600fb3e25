"""Read which releases of vLLM are broken for which models: ``recipes/env/broken.toml``.

Its head describes the fields. Presets, the command line and the symptoms of a log all ask here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated

from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.releases import check_range, within
from patchkit.runtime.rules.rule import Grounded, Situation, holding

PLACE = RECIPES / "env" / "broken.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken(Grounded):
    """A fault of some releases with some models, its cause and its cure."""

    models: tuple[str, ...]
    architectures: tuple[str, ...] = ()
    installed: Mapping[str, Annotated[str, check_range]] = field(default_factory=dict)
    effect: str
    cause: str
    cure: str
    command: str = ""
    costs: str = ""

    def is_about(self, models: Iterable[str], architectures: Iterable[str]) -> bool:
        """Return whether it is about a model of one of these names, or a checkpoint's classes."""
        full_names = [model.rstrip("/").lower() for model in models]
        names = [*full_names, *(name.rpartition("/")[2] for name in full_names)]
        return _any_matches(names, self.models) or _any_matches(
            architectures, self.architectures
        )

    def is_certain(self, situation: Situation) -> bool:
        """Return whether all packages that it takes are known to be here."""
        return bool(self.installed) and all(
            situation.get(name) for name in self.installed
        )

    def is_possible(self, situation: Situation) -> bool:
        """Return whether no package that is known here speaks against it."""
        versions = {name: situation.get(name, "") for name in self.installed}
        return all(
            within(version, self.installed[name])
            for name, version in versions.items()
            if version
        )


@cache
def load_broken() -> Mapping[str, Broken]:
    """Return all faults by id. Raises UsageError for what means nothing, with file and line."""
    return {row.id: row for row in read_toml(tuple[Broken, ...], PLACE, key="broken")}


def broken_for(
    models: Iterable[str], architectures: Iterable[str], situation: Situation
) -> tuple[Broken, ...]:
    """Return the faults that a model, by its names and its checkpoint's classes, may meet here."""
    names = tuple(models)
    # They come from a checkpoint's config, which may hold anything.
    classes = tuple(name for name in architectures if isinstance(name, str))
    return tuple(
        row
        for row in holding(load_broken().values(), situation)
        if row.is_about(names, classes) and row.is_possible(situation)
    )


def _any_matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
