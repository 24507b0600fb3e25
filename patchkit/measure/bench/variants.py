"""Say what is measured: ways to serve a model, the loads that each is put under, and the order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from patchkit.records import RecordError, matching, read_toml

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}"  # a part of a file's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to serve a model.

    ``venv`` has its vLLM, "" is the one of this program; ``env_file`` is loaded, then ``set``.
    ``args`` are words for `vllm serve`. A ``plain`` one gets neither variables nor flags that
    patchkit would choose. ``cluster`` is the file of a cluster that serves it, under its units;
    ``venv`` then has the vLLM that asks, here.
    """

    name: Annotated[str, matching(_NAME, "a short name: letters, digits, . _ -")]
    venv: str = ""
    env_file: str = ""
    set: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    plain: bool = False
    cluster: str = ""

    def __post_init__(self) -> None:
        if self.cluster and (self.plain or self.env_file):
            raise RecordError(f"{self.name}: a cluster has neither plain nor env_file", "cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """Random prompts of ``depth`` tokens, answers of ``output``, ``concurrency`` at a time."""

    depth: int
    output: int
    concurrency: int
    prompts: int

    @property
    def name(self) -> str:
        return f"in{self.depth}-out{self.output}-c{self.concurrency}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _VariantFile:
    variant: tuple[Variant, ...]


def read_variants(path: Path) -> tuple[Variant, ...]:
    """Return the variants of a TOML file. Raises UsageError, with the line of what does not fit."""
    return read_toml(_VariantFile, path).variant


def loads(
    depths: Sequence[int], outputs: Sequence[int], concurrencies: Sequence[int], prompts: int
) -> tuple[BenchLoad, ...]:
    """Return every combination; ``prompts`` are for each place of the concurrency."""
    return tuple(
        BenchLoad(
            depth=depth, output=output, concurrency=at_once, prompts=max(4, prompts * at_once)
        )
        for depth in depths
        for output in outputs
        for at_once in concurrencies
    )


def turns(variants: Sequence[Variant], rounds: int) -> Iterator[tuple[int, Variant]]:
    """Yield the order of the measurements: A B, B A, A B …

    Whatever drifts with time, such as heat, then falls on all variants alike.
    """
    for number in range(rounds):
        for each in variants if number % 2 == 0 else reversed(variants):
            yield number, each
