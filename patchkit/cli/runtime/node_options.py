"""Define the options that describe a node; show the notes and the memory of its plan."""

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from patchkit.cli.render import Lines, Verb, counted_noun, lead_word, note, options_of
from patchkit.runtime.envfile.env_file import locked_versions
from patchkit.runtime.host.probe import probe
from patchkit.runtime.memory.plan import MemoryPlan, MemoryRow
from patchkit.runtime.node.decision import NodeOptions
from patchkit.runtime.rules.rule import RuleChoice

# The options whose values become fields of NodeOptions.
_FIELDS = "role nodes head topology executor vllm nccl triton target quantization"


def node_options(verb: Verb) -> Verb:
    """Add the options; the verb takes them as ``request``, ``choice``, ``host`` and ``root``.

    If an option for a version is missing, the version in a lock counts. ``choice`` says which rules
    for variables or flags are on or off. ``host`` has the facts that were read below ``root``.
    """

    @functools.wraps(verb)
    def wrapped(
        *arguments: Any,
        lock: Path | None,
        root: Path,
        python: str | None,
        **options: Any,
    ) -> Any:
        fields: dict[str, Any] = dict(locked_versions(lock)) if lock else {}
        for name in _FIELDS.split():
            if value := options.pop(name):
                fields[name] = value
        choice = RuleChoice(
            wanted=frozenset(options.pop("wanted")),
            unwanted=frozenset(options.pop("unwanted")),
        )
        # `patchkit env` is a group, too: its subcommands need no facts of this machine.
        is_group = click.get_current_context().invoked_subcommand
        host = None if is_group else probe(root, python=python)
        return verb(
            *arguments,
            request=NodeOptions(**fields),
            choice=choice,
            host=host,
            root=root,
            **options,
        )

    # These have no defaults: a missing value comes from an env file, or patchkit decides it.
    return options_of("node")(wrapped)


def note_lines(notes: Iterable[str], advice: Iterable[Any]) -> Lines:
    """Yield the notes of a plan, and the problems that no setting solves."""
    yield from map(note, notes)
    for problem in advice:
        yield lead_word("beware") + f"{problem.says}; instead: {problem.instead}"


_WIDTH = 60  # columns of the picture
_CACHE = "KV cache"


def memory_lines(plan: MemoryPlan | None) -> Iterator[str]:
    """Yield the lines of a plan; none for no plan, or one that lacks parts."""
    if plan is None or not plan.is_whole:
        return

    total = plan.total_gib
    cache = MemoryRow(_CACHE, max(plan.cache_gib, 0), _cache_text(plan))
    rows = [*plan.rows, cache, *plan.outside]
    rest = total - sum(row.gib for row in rows)
    rows.append(MemoryRow("unused", rest, "--gpu-memory-utilization leaves it"))

    yield f"memory of a node: {total:.1f} GiB"
    yield f"  {_draw(rows, total)}"
    for row in rows:
        if row.gib > 0:
            yield f"  {row.name:<12}{row.gib:6.1f}  {row.source}"


def _cache_text(plan: MemoryPlan) -> str:
    """Return the longest context that the cache holds, and how many such requests at once."""
    longest = plan.longest_context
    if not longest:
        return "how long a request may be is unknown"
    requests = counted_noun(plan.fitting_sequences(longest), "request")
    return f"{requests} of {longest:,} tokens"


def _draw(rows: list[MemoryRow], total: float) -> str:
    """Return a bar in which each part has its first letter, as wide as its share."""
    bar = ""
    end = 0.0
    for row in rows:
        end += max(row.gib, 0)
        columns = round(end / total * _WIDTH)
        bar += row.name[0].upper() * (columns - len(bar))
    return f"[{bar[:_WIDTH]:<{_WIDTH}}]"
