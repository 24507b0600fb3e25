"""How long a reader of the workers' ring spins, and how long it sleeps if nobody wakes it."""

from contextlib import nullcontext, suppress
from functools import partial
from textwrap import indent
from types import SimpleNamespace

from patchkit.recipes.vllm import kit

_RING = "vllm/distributed/device_communicators/shm_broadcast.py"
_ENVS = "vllm/envs.py"
_VARIABLE = "VLLM_SHM_BROADCAST_BUSY_LOOP_S"

_SECOND = "        busy_loop_s: float = 1,\n"
_SET = f"        busy_loop_s: float = envs.{_VARIABLE},\n"
_SLEEP = "events = dict(self.poller.poll(timeout=timeout_ms))"
_SLEEP_BRIEFLY = """\
# A notification may be dropped (SNDHWM is 1): look at the ring ten times a second.
recheck_ms = 100 if timeout_ms is None else min(timeout_ms, 100)
events = dict(self.poller.poll(timeout=recheck_ms))"""
_NEIGHBOUR = '    "VLLM_MQ_MAX_CHUNK_BYTES_MB": lambda: int(\n'
_SETTING = f"""\
    "{_VARIABLE}": lambda: float(
        os.getenv("{_VARIABLE}", "0.002")
    ),
"""
# Settings that leave the cache of compiled graphs as it is
_IGNORED = '        "VLLM_RINGBUFFER_WARNING_INTERVAL",\n'
_IGNORED_TOO = f'{_IGNORED}        "{_VARIABLE}",\n'


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read for how long a reader spins, and the settings, of which that may be one."""
    ring = tree.read(_RING)
    envs = tree.read(_ENVS)
    if _VARIABLE in envs and _SETTING not in envs:
        return kit.upstream(f"{_ENVS}: {_VARIABLE} is a setting")

    spins = partial(kit.swap_text, _RING, ring)
    settings = partial(kit.swap_text, _ENVS, envs)
    waits = partial(kit.swap, _RING, ring, "SpinCondition.wait")
    edits = kit.together(
        partial(spins, _SECOND, _SET, note="spins as long as is set"),
        partial(waits, _SLEEP, _SLEEP_BRIEFLY, note="sleeps less"),
        partial(settings, _NEIGHBOUR, _SETTING + _NEIGHBOUR, note="2 ms"),
        partial(settings, _IGNORED, _IGNORED_TOO, note="no part of a graph"),
    )
    return kit.found(
        edits,
        now=f"{_RING}: a reader spins for a second after each message",
        done=f"{_RING}: a reader spins for 2 ms after each message, and looks again after 100",
    )


def prove(case: kit.Case) -> str:
    """Run the release's own reader on a clock of ours, before and after; nobody notifies it."""
    patched = partial(_read, case.patched)
    questions = (
        partial(_read, case.stock),
        patched,
        partial(patched, "1"),
        partial(patched, "", 0.25),
    )
    (spun, slept, _ended), *after = kit.ask(case.patched, questions, list[int])

    # Upstream counts what is left of the patience in whole milliseconds.
    expected = [[2, 100, 1502], [1000, 100, 1500], [2, 100, 249]]
    if after != expected:
        raise kit.ProofError(
            f"{_RING}: a reader spins, sleeps and ends after {after} ms, expected {expected}",
            why="the code was edited by hand, or upstream rewrote it",
        )

    sleep = "for ever" if slept < 0 else f"for {slept} ms"
    return (
        f"after a message a reader spins for {spun} ms before, for 2 ms after; not woken it sleeps "
        f"{sleep} before, for 100 ms after"
    )


class _Ring:
    """A ring that is written to after 1.5 s, on a clock (us) that its reader sets forward."""

    now = spun = slept = 0

    def __getitem__(self, index: int) -> bool:
        return index == 0 and self.now >= 1_500_000  # the reader's own flag stays 0

    def monotonic(self) -> float:
        return self.now / 1e6

    def spin(self) -> None:
        self.spun = self.now
        self.now += 500

    def sleep(self, timeout: int | None) -> list[object]:
        self.slept = -1000 if timeout is None else max(self.slept, timeout * 1000)
        self.now += 10**9 if timeout is None else timeout * 1000
        return []


def _read(
    tree: kit.SourceTree, seconds: str = "", timeout_s: float | None = None
) -> list[int]:
    """Return for how many ms a reader spins and at most sleeps (-1: for ever), and when it ends."""
    ring = _Ring()
    code = kit.on_device(tree, *kit.GB10, {_VARIABLE: seconds} if seconds else {})
    code.put(_RING, "time", ring)
    code.put(_RING, "sched_yield", ring.spin)
    code.put(_RING, "SPINLOOP_EXT_ENABLED", False)

    queue = object.__new__(code.get(_RING, "MessageQueue"))
    queue.buffer = SimpleNamespace(
        get_metadata=lambda _: nullcontext(ring), get_data=nullcontext
    )
    queue._is_local_reader = True
    queue.shutting_down = False
    queue.local_reader_rank = queue.current_idx = 0
    queue._spin_condition = code.get(_RING, "SpinCondition")(True, kit.Anything(), "")
    queue._spin_condition.poller = SimpleNamespace(poll=ring.sleep)

    with suppress(TimeoutError):
        next(queue.acquire_read(timeout_s, timeout_s is None))
    return [time // 1000 for time in (ring.spun, ring.slept, ring.now)]


_EXAMPLE = (
    "class SpinCondition:\n    def __init__(\n        self,\n{}    ): ...\n\n"
    "    def wait(self, timeout_ms=None):\n{}\n"
)
FIX = kit.Fix(
    title="Readers of the workers' ring rest between two steps",
    symptom="With two ranks or more, two cores of a Spark are at 100 % and hot while it generates.",
    why="A reader spins for a second after each message before it rests. Steps come every 20 to 60 "
    "ms, so EngineCore and the workers beside it never rest, and CPU and GPU share power and heat. "
    "With 2 ms they do. A notification may be dropped, and who rests often must not oversleep: a "
    "reader looks at the ring every 100 ms. VLLM_SHM_BROADCAST_BUSY_LOOP_S sets other seconds. "
    "VLLM_USE_SPINLOOP_EXT has to stay 0, and the ranks of other nodes have no ring.",
    needs=(kit.recommended(">=0.18", "a core spins for EngineCore and each worker"),),
    upstream="vllm#52814 (open) has the variable, with 1 s as the default; #51950 was closed",
    look=look,
    prove=prove,
    examples=(
        kit.Example(
            "0.33.0",
            _RING,
            _EXAMPLE.format(_SECOND, indent(_SLEEP, " " * 8)),
            _EXAMPLE.format(_SET, indent(_SLEEP_BRIEFLY, " " * 8)),
            beside={_ENVS: f"{_SETTING}{_NEIGHBOUR}{_IGNORED_TOO}"},
        ),
    ),
)
