"""Read what a server of this machine is: its processes, its log, its flags, its model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from patchkit.cluster.agent.processes import Process, listeners_at, read_processes
from patchkit.cluster.launch.cluster import Cluster, read_group_journal
from patchkit.errors import HostError
from patchkit.frozen import Fields, Texts, Values, frozen
from patchkit.reading import read_bytes, read_environment, read_strings
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.memory.cache import DRAFTING_LAYERS
from patchkit.runtime.memory.checkpoint import find_checkpoint, read_count
from patchkit.runtime.memory.given_flags import given_flags
from patchkit.runtime.memory.plan import SEQUENCES
from patchkit.runtime.memory.weights import TENSOR_PARTS
from patchkit.runtime.rules.presets import DRAFTING, find_preset

_SERVER = read_toml(Fields, RECIPES / "bench.toml", key="server")
_LOG = {name: re.compile(text) for name, text in _SERVER["log"].items()}
_FORCED = re.compile(_SERVER["forced"])
_NEEDED = re.compile(_SERVER["variables"])
_LINES = 5000  # of a log: more than a start writes
_LONGEST = 20_000  # characters of a line
_LARGEST = 64 << 20  # bytes of a log


@frozen
class ServerProcess:
    """A server's process: its folder in /proc, its words, its variables.

    ``words[0]`` is its Python. ``engines`` has the processes below it, or itself if there is none,
    by PID, with their names.
    """

    folder: Path
    words: Texts
    variables: Values
    engines: Values

    def read_delays(self) -> dict[str, float]:
        """Return the seconds that each engine has waited for a core since its start, by name.

        Only main threads count: those of engine and workers run the steps.
        """
        delays = {}
        for pid, name in self.engines.items():
            with contextlib.suppress(OSError):  # it ended
                figures = Path(f"/proc/{pid}/schedstat").read_text().split()
                delays[name] = int(figures[1]) / 1e9
        return delays


def find_server_process(url: str) -> ServerProcess:
    """Return the process that listens at a URL, with those of its variables that --why needs.

    Raises HostError if there is none, or if it belongs to another user.
    """
    listeners = listeners_at(url)
    # 0, which /proc lacks: there is no listener, or only another user's.
    pid = max((listener.pid for listener in listeners), default=0)
    processes = list(read_processes())
    with contextlib.suppress(OSError):  # it ended, or is another user's
        variables = read_environment(pid)
        folder = Path(f"/proc/{pid}")
        return ServerProcess(
            folder=folder,
            words=tuple(read_strings(folder / "cmdline")),
            variables={
                name: text for name, text in variables.items() if _NEEDED.match(name)
            },
            engines=dict(_children(pid, processes)) or {str(pid): f"process {pid}"},
        )

    raise HostError(
        f"{url}: no process of this user on this machine is found there",
        why="it belongs to another user, or has ended"
        if listeners
        else "nothing listens there, or ss (iproute2) is not installed",
        hint="patchkit up MODEL",
    )


def _children(pid: int, processes: Sequence[Process]) -> Iterator[tuple[str, str]]:
    for process in processes:
        if process.parent == pid:
            yield str(process.pid), f"{process.name} (process {process.pid})"
            yield from _children(process.pid, processes)


def log_lines(
    log: Path | None, process: ServerProcess, cluster: Cluster | None
) -> Sequence[str]:
    """Return the first lines of a log, that which the server writes, or the cluster's journal."""
    path = log or (process.folder / "fd" / "1").resolve()
    if log or path.is_file():
        text = read_bytes(path, limit=_LARGEST).decode(errors="replace")
        return text.splitlines()[:_LINES]
    if cluster:
        journal = read_group_journal(cluster, lines=_LINES)
        return [line.text for _node, line in journal.lines]
    return ()


def read_log(lines: Iterable[str]) -> dict[str, str]:
    """Return what a log says, by the names in [server.log] of bench.toml; the last match counts."""
    facts: dict[str, str] = {}
    for line in lines:
        for name, pattern in _LOG.items():
            if match := pattern.search(line[:_LONGEST]):
                facts[name] = match[1]
    return facts


def read_setup(
    process: ServerProcess, chosen: Sequence[str], lines: Sequence[str]
) -> Fields:
    """Return how the engine is set up: the log's words go before the flags of the command.

    ``chosen`` are the words of the command that a user wrote.
    """
    flags = given_flags(process.words)
    choices = {**process.variables, **given_flags(chosen)}
    forced = [f"{name} {text}" for name, text in choices.items() if _FORCED.match(name)]
    return {
        "eager": str("--enforce-eager" in flags),
        "speculative": flags.get(DRAFTING, "None"),
        "max_seqs": flags.get(SEQUENCES),
        "ranks": float(flags.get(TENSOR_PARTS, "1")),
        "forced": ", ".join(forced),
        **read_log(lines),
    }


def read_model(model: str, folder: str, variables: Values) -> Fields:
    """Return a model's layers, width and bytes for a token, and how it drafts.

    ``layers`` is None if unknown, then ``hidden`` is a usual width; ``drafter`` is "" for none.
    """
    checkpoint = find_checkpoint(folder, variables)
    config = checkpoint.config if checkpoint else {}
    preset = find_preset(model)
    drafter = preset.drafter if preset else ""
    if any(read_count(config, key) for key in DRAFTING_LAYERS):
        drafter = drafter or _SERVER["mtp"]
    return {
        "layers": read_count(config, "num_hidden_layers") or None,
        "hidden": read_count(config, "hidden_size") or _SERVER["hidden"],
        "reads": checkpoint.reads if checkpoint else 0.0,
        "drafter": drafter,
    }
