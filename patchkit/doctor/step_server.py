"""Read what runs at a port of this machine: processes, log, flags of vLLM."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchkit.cluster.agent.processes import read_processes
from patchkit.errors import HostError
from patchkit.foreign import read_number
from patchkit.frozen import Fields, Texts, Values, frozen
from patchkit.reading import read_environment, read_strings
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.memory.given_flags import given_flags
from patchkit.runtime.rules.presets import DRAFTING

_LOG: Values = read_toml(Fields, RECIPES / "bench.toml", key="why")["log"]
_PATTERNS = {name: re.compile(text) for name, text in _LOG.items()}
_LISTENS = "0A"  # a state in /proc/net/tcp
_PROC = Path("/proc")
_BACK_END = re.compile(r"--(?:attention|moe|linear|mm-encoder-attn)-backend")
_LONGEST = 20_000  # characters of a line
_SIZE = re.compile(r"\d{1,6}")


@frozen
class ServerProcess:
    """A server's process: its words, its variables, and the processes that it started, by PID."""

    pid: int
    words: Texts
    variables: Values
    children: tuple[int, ...]

    @property
    def python(self) -> str:
        """Return the path of the Python that runs the server, "" if it is not known."""
        name = self.words[0] if self.words else ""
        if "python" not in name:  # a title, as some processes of vLLM give themselves
            name = str(_read_link(_PROC / str(self.pid) / "exe") or "")
        return shutil.which(name, path=self.variables.get("PATH")) or ""

    @property
    def log(self) -> Path | None:
        """Return the file that the server writes to, None if that is no file."""
        with contextlib.suppress(OSError):
            path = Path(_PROC, str(self.pid), "fd", "1").resolve()
            return path if path.is_file() else None
        return None

    @property
    def is_contained(self) -> bool:
        """Return whether the server has another root than this machine."""
        with contextlib.suppress(OSError):
            return Path(_PROC, str(self.pid), "root").readlink() != Path("/")
        return True


def find_server_process(port: int) -> ServerProcess:
    """Return the process that listens at a port.

    Raises HostError if there is none, or if it belongs to another user.
    """
    inodes = set(_listening_inodes(port))
    processes = list(read_processes())
    for process in processes:
        with contextlib.suppress(OSError):  # it ended, or belongs to another user
            files = (_PROC / str(process.pid) / "fd").iterdir()
            if any(str(_read_link(file)) in inodes for file in files):
                return ServerProcess(
                    pid=process.pid,
                    words=tuple(read_strings(_PROC / str(process.pid) / "cmdline")),
                    variables=read_environment(process.pid),
                    children=tuple(_descendants(process.pid, processes)),
                )

    why = "it belongs to another user" if inodes else "nothing listens there"
    raise HostError(
        f"port {port}: the server's process is not readable",
        why=why,
        hint="run it on the server's machine, as the user of the server",
    )


def _read_link(file: Path) -> Path | None:
    with contextlib.suppress(OSError):
        return file.readlink()
    return None


def _listening_inodes(port: int) -> Iterator[str]:
    """Yield the sockets that listen at a port, as links of /proc/PID/fd name them."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(_PROC, "net", name).read_text().splitlines()[1:]:
                cells = line.split()
                if cells[3] == _LISTENS and cells[1].endswith(f":{port:04X}"):
                    yield f"socket:[{cells[9]}]"


def _descendants(pid: int, processes: Sequence[Any]) -> Iterator[int]:
    for process in processes:
        if process.parent == pid:
            yield process.pid
            yield from _descendants(process.pid, processes)


def read_delays(pids: Iterable[int]) -> Mapping[int, float]:
    """Return the seconds that each process has waited for a core since its start.

    Only main threads count: those of engine and workers run the steps.
    """
    delays = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):  # it ended
            _used, delayed, _turns = (
                (_PROC / str(pid) / "schedstat").read_text().split()
            )
            delays[pid] = int(delayed) / 1e9
    return delays


def process_name(pid: int) -> str:
    """Return the name and the number of a process."""
    with contextlib.suppress(OSError):
        name = (_PROC / str(pid) / "comm").read_text(errors="replace").strip()
        return f"{name} (process {pid})"
    return f"process {pid}"


def read_log(lines: Iterable[str]) -> dict[str, str]:
    """Return what vLLM's log says, by the names in [why.log] of bench.toml; the last one counts."""
    facts: dict[str, str] = {}
    for line in lines:
        for name, pattern in _PATTERNS.items():
            if match := pattern.search(line[:_LONGEST]):
                facts[name] = match[1]
    return facts


def engine_facts(server: ServerProcess, log: Values) -> dict[str, Any]:
    """Return how the engine is set up: the log's words go before the flags of the command.

    ``eager`` and ``forced`` are yes or no, ``drafts`` on or off, ``sizes`` the numbers of tokens
    with a CUDA graph, None if unknown.
    """
    flags = given_flags(server.words)
    eager = log.get("eager", str("--enforce-eager" in flags))
    speculative = log.get("speculative", flags.get(DRAFTING, "None"))
    forced = [
        f"{name} {value}" for name, value in flags.items() if _BACK_END.fullmatch(name)
    ]
    if variable := server.variables.get("VLLM_ATTENTION_BACKEND"):
        forced.append(f"VLLM_ATTENTION_BACKEND={variable}")

    sizes = [int(size) for size in _SIZE.findall(log.get("graph_sizes", ""))]
    return {
        "eager": "yes" if eager == "True" else "no",
        "drafts": "off" if speculative == "None" else "on",
        "max_seqs": flags.get("--max-num-seqs", "the release's default"),
        "back_end": ", ".join(forced),
        "sizes": sorted(sizes),
        "weights_gib": read_number(log.get("weights_gib", "0")),
        "ranks": int(flags.get("--tensor-parallel-size", "1")),
    }
