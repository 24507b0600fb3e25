"""Read from ``recipes/env/broken.toml`` which releases of vLLM are broken for which models.

The head of that file describes the fields. `serve-args`, `up` and `doctor --log` use this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from typing import Annotated

from patchkit.frozen import frozen
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.releases import check_range, within
from patchkit.runtime.rules.rule import Grounded, Names, Situation, select_entries

PLACE = RECIPES / "env" / "broken.toml"


@frozen
class Broken(Grounded):
    """A fault of some releases with some models, its cause and its cure.

    ``models`` are patterns of model names in lower case, with or without the owner.
    ``architectures`` are patterns of classes in a checkpoint's config. ``installed`` maps the
    packages that take part in the fault to ranges of versions. ``command`` applies the cure.
    """

    models: Names
    architectures: Names = ()
    installed: Mapping[str, Annotated[str, check_range]] = field(default_factory=dict)
    effect: str
    cause: str
    cure: str
    command: str = ""
    costs: str = ""

    def is_about(self, models: Iterable[str], architectures: Iterable[str]) -> bool:
        """Return whether the fault affects one of these model names or architectures."""
        full_names = [model.rstrip("/").lower() for model in models]
        short_names = [name.rpartition("/")[2] for name in full_names]

        pairs = (
            *product((*full_names, *short_names), self.models),
            *product(architectures, self.architectures),
        )
        return any(fnmatchcase(*pair) for pair in pairs)

    def is_possible(self, situation: Situation) -> bool:
        """Return whether every package whose version is known is in the range of the fault."""
        for name, bounds in self.installed.items():
            version = situation.get(name)
            if version and not within(version, bounds):
                return False

        return True


@cache
def load_broken() -> Mapping[str, Broken]:
    """Return all faults by id. Raises UsageError, with file and line, for a wrong entry."""
    faults = read_toml(tuple[Broken, ...], PLACE, key="broken")
    return {fault.id: fault for fault in faults}


def broken_for(
    models: Iterable[str], architectures: Iterable[str], situation: Situation
) -> tuple[Broken, ...]:
    """Return the faults that may affect a model in a situation.

    ``models`` are the names that the model has, ``architectures`` its classes.
    """
    names = tuple(models)
    # Architectures come from a checkpoint's config, whose values may have any type.
    classes = tuple(name for name in architectures if isinstance(name, str))

    return tuple(
        fault
        for fault in select_entries(load_broken().values(), situation)
        if fault.is_about(names, classes) and fault.is_possible(situation)
    )
