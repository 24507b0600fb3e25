"""Measure models one after the other: one that fails does not end the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.cluster.launch.cluster_file import MODELS, read_cluster_file
from patchkit.cluster.models.names import ModelFolder
from patchkit.cluster.models.sync import ModelNode, models_of
from patchkit.cluster.ssh.ssh import HERE
from patchkit.durable.atomic import replacing
from patchkit.durable.failure import translated
from patchkit.errors import HostError, PatchkitError, UsageError
from patchkit.measure.bench.results import MAIN, series


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """A model and its folder of results; ``error`` is why it has none, None if it has."""

    name: str
    folder: Path
    error: PatchkitError | None = None


def models_here(folder: str = MODELS) -> dict[str, str]:
    """Return commits by model: those that lie whole on this machine. Raises UsageError for none."""
    (found,) = models_of([ModelNode(ssh=HERE, peer="", models=folder)])
    if isinstance(found, PatchkitError):
        raise found
    whole = {each.repo: each.commit for each in found if each.complete and each.repo}
    if not whole:
        raise UsageError(f"no whole model lies in {folder}", hint="patchkit model list --here")
    return whole


def models_pinned(file: Path) -> dict[str, str]:
    """Return commits by model: those of a cluster's file. Raises UsageError for none."""
    pinned = dict(read_cluster_file(file).models)
    if not pinned:
        raise UsageError(f"{file}: pins no model", hint="patchkit model get openai/gpt-oss-20b")
    return pinned


def measure_every(
    commits: Mapping[str, str],
    folder: Path,
    measure: Callable[[str, Path], None],
    tell: Callable[[str], None],
) -> list[MeasuredModel]:
    """Call ``measure`` with each model and its own folder; return what came of each.

    Writes summary.md of them all.
    """
    done = []
    for number, (name, commit) in enumerate(commits.items(), 1):
        tell(f"model {number} of {len(commits)}: {name}")
        place = folder / ModelFolder(repo=name, commit=commit).name
        try:
            measure(name, place)
        except PatchkitError as error:
            tell(f"{name}: {error.what}")
            done.append(MeasuredModel(name=name, folder=place, error=error))
        else:
            done.append(MeasuredModel(name=name, folder=place))
    with translated(at=folder), replacing(folder / "summary.md") as file:
        file.write("".join(f"{line}\n" for line in _lines(done)).encode())
    return done


def insist_on_all(models: Sequence[MeasuredModel]) -> None:
    """Raise HostError that names the models that were not measured."""
    failed = [each for each in models if each.error]
    if failed and (first := failed[0].error):
        raise HostError(
            f"{len(failed)} of {len(models)} models were not measured: "
            + ", ".join(each.name for each in failed),
            why=f"{failed[0].name}: {first.why or first.what}",
            hint=first.hint,
        )


def _lines(models: Sequence[MeasuredModel]) -> Iterator[str]:
    yield from ("# All models", "", "| model | input, output, at once | variant | figure | |")
    yield "|---|---|---|---|---|"
    for each in models:
        for one in [] if each.error else series(each.folder, MAIN):
            figure = f"{one.measure.name}, {one.measure.unit}"
            yield f"| {each.name} | {one.load} | {one.variant} | {figure} | {one.text} |"
    for each in models:
        if each.error:
            yield from ("", f"Not measured: {each.name}: {' '.join(each.error.what.split())}")
