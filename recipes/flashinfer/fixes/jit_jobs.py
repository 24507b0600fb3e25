"""As many compilers at once as memory holds, where ninja starts one for each core and two more."""

from functools import partial
from textwrap import indent
from types import SimpleNamespace

from patchkit.recipes import kit

_PATH = "flashinfer/jit/cpp_ext.py"
_SCOPE = "run_ninja"
_FUNCTION = '''\
def _available_gib() -> Optional[float]:
    """Return the memory that this machine and this process's control groups have left, in GiB."""

    def read(*parts: str) -> str:
        try:
            return Path("/".join(parts)).read_text()
        except OSError:
            return ""

    kibibytes = re.findall(r"MemAvailable: *(\\d+) kB", read("/proc/meminfo"))
    left = [int(number) / 2**20 for number in kibibytes]

    # /proc/meminfo is that of the machine; a container or a slice has limits of its own. A group's
    # folder counts, and each above it: a container may see its own group as the topmost folder.
    groups = re.findall(
        r"^\\d+:(|memory):(/.*)$", read("/proc/self/cgroup"), re.MULTILINE
    )
    for controller, group in groups:
        folders = f"/sys/fs/cgroup/{controller}".rstrip("/").split("/")
        topmost = len(folders)
        folders += [name for name in group.split("/") if name]
        for end in range(topmost, len(folders) + 1):
            folder = "/".join(folders[:end])
            limits = [
                read(folder, name)
                for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
            ]
            used = read(folder, "memory.current") or read(
                folder, "memory.usage_in_bytes"
            )
            # Files in memory yield to compilers; version 1 counts those of groups below as total_.
            stat = read(folder, "memory.stat")
            files = r"(?:in)?active_file (\\d+)$"
            cached = re.findall(f"^total_{files}", stat, re.MULTILINE) or re.findall(
                f"^{files}", stat, re.MULTILINE
            )
            left += [
                max(0, int(limit) - int(used or 0) + sum(map(int, cached))) / 2**30
                for limit in limits
                if limit.strip().isdigit()
            ]
    return min(left, default=None)


def _jobs_in_memory(ninja_file: Path) -> Optional[int]:
    """Return how many compilers fit into the memory that is available; None if unknown."""
    available = _available_gib()
    try:
        modules = ninja_file.read_text()
    except OSError:
        return None
    if available is None:
        return None

    # GiB that one compiler takes at most: a unit of fused_moe_120 took 10.4, of sampling 1.
    is_cutlass = re.search(
        r"^(name = |subninja ).*(cutlass|gemm|moe)", modules, re.MULTILINE
    )
    needed = 10.5 if is_cutlass else 1.5
    # 8 GiB are left to all others: the GPU of a GB10 takes its memory from the same.
    if available < needed:
        print(
            f"FlashInfer: a compiler may take {needed} GiB, {available:.1f} are available; "
            "one at a time is started",
            file=sys.stderr,
            flush=True,
        )
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, int((available - 8) / needed)))


'''
_DEF = f"def {_SCOPE}("
_BEFORE = """\
if num_workers is not None:
    command += ["-j", str(num_workers)]
"""
_AFTER = f"""\
if num_workers is None:
    num_workers = _jobs_in_memory(ninja_file)
{_BEFORE}"""


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Return the edits that let memory decide how many compilers start if MAX_JOBS is unset."""
    text = tree.read(_PATH)
    reads_memory = "MemAvailable" in text
    if reads_memory and _FUNCTION not in text:
        return kit.upstream(f"{_PATH}: the memory decides how many compilers run")

    edits = kit.together(
        partial(
            kit.swap_text, _PATH, text, _DEF, _FUNCTION + _DEF, note="memory is read"
        ),
        partial(kit.swap, _PATH, text, _SCOPE, _BEFORE, _AFTER, note="ninja is told"),
    )
    return kit.found(
        edits,
        now=f"{_PATH}: ninja starts a compiler for each core and two more",
        done=f"{_PATH}: ninja starts as many compilers as memory holds",
    )


# Files of a simulated machine, each with its text: the memory of a GB10 without weights; groups of
# a container that sees its own alone, of a service below a slice, and of a container of version 1,
# whose group is the topmost folder, though it has a path on the machine.
_FREE = "| /proc/meminfo=MemAvailable:"
_GB10 = f"{_FREE} {116 << 20} kB"
_TOP = "| /sys/fs/cgroup"
_OWN = f"{_GB10} | /proc/self/cgroup=0::/"
# What ninja is told, cores, MAX_JOBS, what ninja's file says, and files. First a GB10 without
# weights, then one with 75 GB of them, machines with too little memory, a user's own number, and a
# system without /proc/meminfo. Then limits on a GB10: a container, one whose weights are in files
# that yield, a slice, a service that slows down at memory.high, a container of version 1, and two
# without a limit.
_MACHINES = f"""\
10   20 - name = fused_moe_120 {_GB10}
3    20 - name = fp4_gemm_cutlass_sm120 {_FREE} {45 << 20} kB
3    20 - subninja /a/gemm_sm120/build.ninja {_FREE} {45 << 20} kB
20   20 - name = sampling; includes = -isystem /cutlass {_FREE} {45 << 20} kB
4    8  - name = sampling {_FREE} {14 << 20} kB
1    8  - name = fused_moe_120 {_FREE} {15 << 20} kB
1    8  - name = fused_moe_120 {_FREE} {4 << 20} kB
6    20 6 name = fused_moe_120 {_FREE} {45 << 20} kB
none 20 - name = fused_moe_120
2    20 - name = moe {_OWN} {_TOP}/memory.max={36 << 30} {_TOP}/memory.current={4 << 30}
2    20 - name = moe {_OWN} {_TOP}/memory.max={64 << 30} {_TOP}/memory.current={62 << 30}\
 {_TOP}/memory.stat=file {40 << 30}; inactive_file {24 << 30}; active_file {8 << 30}
2    20 - name = moe {_OWN}a.slice/b.service {_TOP}/a.slice/memory.max={52 << 30}\
 {_TOP}/a.slice/memory.current={20 << 30}\
 {_TOP}/a.slice/b.service/memory.max=max
3    20 - name = moe {_OWN}a.slice/b.service {_TOP}/a.slice/b.service/memory.max=max\
 {_TOP}/a.slice/b.service/memory.high={48 << 30}\
 {_TOP}/a.slice/b.service/memory.current={6 << 30}
2    20 - name = moe {_OWN}; 4:memory:/docker/c {_TOP}/memory/memory.limit_in_bytes={36 << 30}\
 {_TOP}/memory/memory.usage_in_bytes={8 << 30}\
 {_TOP}/memory/memory.stat=inactive_file {7 << 30}; total_inactive_file {4 << 30}
10   20 - name = moe {_OWN} {_TOP}/memory.max=max {_TOP}/memory.current={60 << 30}
10   20 - name = moe {_OWN}; 4:memory:/docker/c\
 {_TOP}/memory/memory.limit_in_bytes=9223372036854771712
""".splitlines()


def prove(case: kit.Case) -> str:
    """Run the tree's own run_ninja on simulated machines, and read what ninja would be told.

    Raises ProofError if ninja would start another number of compilers than a machine has room for.
    """
    questions = [partial(_jobs_told, case.patched, machine) for machine in _MACHINES]
    questions.append(partial(_jobs_told, case.stock, _MACHINES[0]))
    *answers, stock_answer = kit.ask(case.patched, questions, str)

    # A machine's text begins with what ninja has to be told.
    expected = [machine.split()[0] for machine in _MACHINES]
    if answers != expected:
        raise kit.ProofError(
            f"{_PATH}: ninja would be told -j {answers}, expected {expected}",
            why="the function was edited by hand, or upstream rewrote it",
        )
    return (
        "ninja is told -j 10 for CUTLASS in 116 GiB, -j 3 in 45, -j 1 in 15, -j 2 in a container "
        f"of 36 GiB; before: {stock_answer}, and by itself it starts 22 on 20 cores"
    )


def _jobs_told(tree: kit.SourceTree, machine: str) -> str:
    """Return the number of jobs in the command that the release's code runs; "none" without."""
    _jobs, cores, max_jobs, machine = machine.split(maxsplit=3)
    modules, *files = machine.replace("; ", "\n").split(" | ")
    texts = dict(file.split("=", 1) for file in files)
    words: list[str] = []
    names = {
        "os": SimpleNamespace(
            environ={"MAX_JOBS": max_jobs},
            sched_getaffinity=lambda _process: range(int(cores)),
        ),
        "Path": lambda path: SimpleNamespace(read_text=lambda: texts.get(path, "")),
        "subprocess": SimpleNamespace(
            run=lambda command, **_options: words.extend(command), STDOUT=None
        ),
    }

    run_ninja = kit.Code(tree, names).get(_PATH, _SCOPE)
    ninja_file = SimpleNamespace(read_text=lambda: modules, resolve=str)
    run_ninja(kit.Anything(), ninja_file, verbose=True)
    return " ".join(words[7:]) or "none"


FIX = kit.Fix(
    title="FlashInfer starts as many compilers as memory holds",
    symptom="At the first start of a model the Spark hangs, or compilers end with code 137, while "
    "FlashInfer compiles fused_moe_120 or fp4_gemm_cutlass_sm120.",
    why="ninja starts a compiler for each core and two more: 22 on a GB10. One takes up to 10.4 "
    "GiB for CUTLASS, beside the weights in the same memory. With this fix they share what is left "
    "of the machine's memory, and of the container's or slice's, less 8 GiB: 10.5 GiB each for "
    "modules of CUTLASS, 1.5 for others, one at least; a line says if there is too little for one. "
    "MAX_JOBS still decides if it is set; `patchkit env` leaves it out where this fix is in.",
    needs=(
        kit.recommended(
            ">=0.5.2", "22 compilers at once may take the Spark down at the first start"
        ),
    ),
    upstream="flashinfer#3899, #3665 and #3636 (open) do as much; not in 0.7.4",
    look=look,
    prove=prove,
    majors=(11, 12),
    examples=(
        kit.Example(
            "0.7.2.post1",
            _PATH,
            f"{_DEF}ninja_file):\n{indent(_BEFORE, '    ')}",
            f"{_FUNCTION}{_DEF}ninja_file):\n{indent(_AFTER, '    ')}",
        ),
    ),
)
