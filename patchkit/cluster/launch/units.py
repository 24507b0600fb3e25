"""Write the units of a cluster's ranks, and what ties them together. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.cluster.agent import group_script
from patchkit.cluster.agent.unit_state import MARK

SCRIPT = Path(group_script.__file__)
SECRETS = "%h/.config/patchkit/secrets.env"
BURST = 4  # starts in an hour: unlimited ones have driven Sparks into a physical reset
RAY_SECONDS = 120  # for Ray's head to listen: measured are 6 on two slow cores
ASK_AGAIN = 20  # seconds between two starts
STOP = 30  # seconds for a rank to end by itself: with a request under way vLLM did not in 60
_PROGRAMS = "/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUnit:
    """What a node runs: ``words`` is the command, ``env`` the text of its variables.

    ``ray`` is its `ray start`, where Ray starts the ranks: all that a worker runs then. ``seconds``
    is how long a start may take.
    """

    node: str
    words: tuple[str, ...]
    env: str
    bin: str
    seconds: int
    ray: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUnits:
    """A cluster's ranks, the head first: its name, what it serves, where it is asked.

    ``links`` are the words of ssh from the head to each worker, by rank from 1; ``ray`` is where
    Ray's head listens, "" without one.
    """

    name: str
    model: str
    url: str
    ranks: tuple[RankUnit, ...]
    links: tuple[tuple[str, ...], ...] = ()
    ray: str = ""

    @property
    def unit(self) -> str:
        return f"patchkit-{self.name}.service"

    def watch(self, rank: str) -> str:
        """Return the unit on the head that has a worker's rank started, watched and stopped."""
        return f"patchkit-{self.name}-worker@{rank}.service"

    @property
    def ray_unit(self) -> str:
        return f"patchkit-{self.name}-ray.service"

    def files(self) -> list[dict[str, str]]:
        """Return the files of each node by name, the head's first.

        Each node's ``group.json`` has the same id: a digest of all files of all nodes.
        """
        bare = [dict(self._files(rank)) for rank in range(len(self.ranks))]
        text = json.dumps([bare, self.links, self.url], sort_keys=True)
        group = hashlib.sha256(text.encode()).hexdigest()[:16]
        return [files | {"group.json": self._json(group, rank)} for rank, files in enumerate(bare)]

    def _files(self, rank: int) -> Iterator[tuple[str, str]]:
        yield "group.py", SCRIPT.read_text(encoding="utf-8")
        yield "node.env", self.ranks[rank].env
        yield self.unit, _text(self._head() if rank == 0 else self._worker(rank))
        if rank == 0 and len(self.ranks) > 1:
            yield self.watch(""), _text(self._watch())
        if rank == 0 and self.ray:
            yield self.ray_unit, _text(self._ray())

    def _json(self, group: str, rank: int) -> str:
        said: dict[str, object] = {"id": group, "name": self.name, "unit": self.unit}
        if rank == 0:
            said |= {
                "model": self.model,
                "url": self.url,
                **({"ray": self.ray} if self.ray else {}),
                "workers": {
                    str(number): {"node": self.ranks[number].node, "ssh": list(words)}
                    for number, words in enumerate(self.links, start=1)
                },
            }
        return json.dumps(said, indent=1) + "\n"

    # The sections of each unit, as pairs: a key may be there several times.

    def _common(self, rank: int) -> list[tuple[str, str]]:
        own = self.ranks[rank]
        variables = {"PATH": f"{own.bin}:{_PROGRAMS}", MARK: self.name}
        return [
            ("EnvironmentFile", f"%h/.config/patchkit/{self.name}/node.env"),
            # The user's own, if it is there: keys and tokens are in no file that patchkit writes.
            ("EnvironmentFile", f"-{SECRETS}"),
            *(("Environment", unit_word(f"{key}={value}")) for key, value in variables.items()),
            ("KillMode", "control-group"),
            ("TimeoutStopSec", str(STOP)),
            # Up to the hard limit of the user's systemd, which root alone raises.
            ("LimitMEMLOCK", "infinity"),
            # Other units of a user have 200; less than user@.service's 100 the kernel refuses.
            ("OOMScoreAdjust", "100"),
            ("ManagedOOMPreference", "avoid"),
        ]

    def _head(self) -> Mapping[str, list[tuple[str, str]]]:
        own = self.ranks[0]
        watches = [self.watch(str(rank)) for rank in range(1, len(self.ranks))]
        before = " ".join([self.ray_unit, *watches] if self.ray else watches)
        # Else vLLM takes any Ray of this machine, or starts one of its own and waits for ever.
        found = [("Environment", f"RAY_ADDRESS={self.ray}")] if self.ray else []
        return {
            "Unit": [
                ("Description", self._described(0)),
                ("StartLimitIntervalSec", "1h"),
                ("StartLimitBurst", str(BURST)),
                # While a worker is waited for, this start is a job that waits, and is not counted.
                *((key, before) for key in ("Wants", "After") if before),
            ],
            "Service": [
                ("Type", "exec"),
                ("ExecStartPre", f"{_PYTHON} {self._script} begin"),
                ("ExecStart", unit_line(own.words)),
                ("ExecStartPost", f"{_PYTHON} {self._script} ready"),
                ("Restart", "always"),
                ("RestartSec", str(ASK_AGAIN)),
                ("TimeoutStartSec", str(own.seconds)),
                *found,
                *self._common(0),
            ],
            "Install": [("WantedBy", "default.target")],
        }

    def _worker(self, rank: int) -> Mapping[str, list[tuple[str, str]]]:
        return {
            # Not enabled and not restarted: the head says when a rank begins, through the unit that
            # wants it, without which it ends.
            "Unit": [("Description", self._described(rank)), ("StopWhenUnneeded", "yes")],
            "Service": [
                ("Type", "exec"),
                ("ExecStart", unit_line(self.ranks[rank].words)),
                ("Restart", "no"),
                *(_RAY_ENDS if self.ray else ()),
                *self._common(rank),
            ],
        }

    def _watch(self) -> Mapping[str, list[tuple[str, str]]]:
        # Killed and not restarted: then RestartSec passes, in which memory comes back. BindsTo of
        # the head would stop it for good.
        again = f"systemctl --user kill --kill-whom=main --signal=SIGKILL {self.unit}"
        return {
            "Unit": [
                ("Description", f"Rank %i of the cluster {self.name}: starts and watches it"),
                ("BindsTo", self.unit),
                *([("After", self.ray_unit)] if self.ray else []),
            ],
            "Service": [
                ("Type", "notify"),
                ("ExecStart", f"{_PYTHON} {self._script} watch %i"),
                # A rank that ended takes the others with it.
                ("ExecStopPost", f"""-/bin/sh -c '[ "$$SERVICE_RESULT" = success ] || {again}'"""),
                ("KillMode", "mixed"),  # the script asks the other end first
                ("TimeoutStartSec", "infinity"),  # a worker is waited for as long as it takes
                ("TimeoutStopSec", str(STOP + 30)),
                ("Environment", f"{MARK}={self.name}"),
            ],
        }

    def _ray(self) -> Mapping[str, list[tuple[str, str]]]:
        return {
            "Unit": [
                ("Description", f"Ray's head of the cluster {self.name}"),
                ("BindsTo", self.unit),
            ],
            "Service": [
                ("Type", "exec"),
                ("ExecStart", unit_line(self.ranks[0].ray)),
                ("ExecStartPost", f"{_PYTHON} {self._script} ray"),
                ("TimeoutStartSec", str(RAY_SECONDS)),
                ("Restart", "no"),
                *_RAY_ENDS,
                *self._common(0),
            ],
        }

    def _described(self, rank: int) -> str:
        count = len(self.ranks)
        part = f", rank {rank} of {count}" if count > 1 else ""
        return unit_text(f"vLLM {self.model}{part} (cluster {self.name})")

    @property
    def _script(self) -> str:
        return f"%h/.config/patchkit/{self.name}/group.py"


_PYTHON = "/usr/bin/python3 -I"
# Asked to end, Ray drains its node for 30 s, and nobody waits for what it has.
_RAY_ENDS = (("KillSignal", "SIGKILL"), ("SuccessExitStatus", "SIGKILL"))


def unit_text(text: str) -> str:
    """Return text for a unit's file, where a percent sign begins a specifier."""
    return " ".join(text.split()).replace("%", "%%")


def unit_word(word: str) -> str:
    """Return a word of a unit's command line or assignment, quoted as systemd.syntax(7) says."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    kept = "".join(
        c if c.isprintable() else "".join(f"\\x{b:02x}" for b in c.encode()) for c in escaped
    )
    return f'"{kept}"' if not word or set(word) & set(" \t\"'\\;") or kept != escaped else kept


def unit_line(words: Sequence[str]) -> str:
    """Return a command line for ExecStart: in it a dollar sign begins a variable."""
    first, *rest = words
    return " ".join([unit_word(first), *(unit_word(each).replace("$", "$$") for each in rest)])


def _text(sections: Mapping[str, list[tuple[str, str]]]) -> str:
    """Return a unit's file."""
    parts = [
        "\n".join([f"[{name}]", *(f"{key}={value}" for key, value in pairs)])
        for name, pairs in sections.items()
    ]
    return (
        "# Written by patchkit cluster up; replaced by the next one.\n" + "\n\n".join(parts) + "\n"
    )
