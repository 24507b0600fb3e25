"""Plan a build: what it fetches and compiles, and all that is missing, before anything is begun."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from patchkit.errors import PatchkitError, SourceError, StorageError
from patchkit.finding import Finding
from patchkit.source.git import unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFetch:
    """What a build takes from elsewhere, unless it is ``there``; ``size`` in bytes, 0 if unlocked.

    ``url`` is that of a git repository.
    """

    name: str
    size: int = 0
    there: bool = False
    url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """``title`` says what is built, ``compiles`` what of it is compiled, if that is known."""

    title: str
    fetches: tuple[PlannedFetch, ...] = ()
    compiles: tuple[str, ...] = ()
    missing: tuple[Finding, ...] = ()

    def require(self) -> None:
        """Raise one error that lists all that is missing."""
        if not self.missing:
            return
        worst = max(self.missing, key=lambda each: each.kind.exit_code)
        raise worst.kind(
            f"this machine cannot build {self.title}:\n"
            + "\n".join(f"    {each.what}: {each.hint}" for each in self.missing),
            why="the release's own build would stop there, some of them after an hour",
            hint="install all of these, then run the same command again",
        )


def not_to_be_had(fetches: Iterable[PlannedFetch], *, offline: bool) -> Iterator[Finding]:
    """Yield what cannot be fetched: everything where ``offline``, else from a host of git's."""
    lacked = [each for each in fetches if not each.there]
    if offline:
        for each in lacked:
            hint = "run once without --offline"
            yield Finding(what=f"{each.name} is not here", hint=hint, kind=SourceError)
        return
    for url in {urlsplit(each.url).netloc: each.url for each in lacked if each.url}.values():
        try:
            why = unreachable(url)
        except PatchkitError as error:  # no git, or no answer
            why = error.what
        if why:
            hint = "check the network; or bring the sources with --source, --mirror or --src"
            yield Finding(what=f"{url}: {why}", hint=hint, kind=StorageError)
