"""As many compilers at once as memory holds, where ninja starts one for each core and two more."""

from functools import partial
from textwrap import indent
from types import SimpleNamespace

from patchkit.recipes import kit

_PATH = "flashinfer/jit/cpp_ext.py"
_SCOPE = "run_ninja"
_FUNCTION = '''\
def _jobs_in_memory(ninja_file: Path) -> Optional[int]:
    """Return how many compilers fit into the memory that is available; None if unknown."""
    try:
        memory = re.search(
            r"MemAvailable: *(\\d+) kB", Path("/proc/meminfo").read_text()
        )
        modules = ninja_file.read_text()
    except OSError:
        return None
    if memory is None:
        return None

    # GiB that one compiler takes at most: a unit of fused_moe_120 took 8.4, of sampling 1.
    is_cutlass = re.search(
        r"^(name = |subninja ).*(cutlass|gemm|moe)", modules, re.MULTILINE
    )
    needed = 8.5 if is_cutlass else 1.5
    # 8 GiB are left to all others: the GPU of a GB10 takes its memory from the same.
    available = int(memory.group(1)) / 2**20
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
    """Read whether ninja is told how many compilers to start where MAX_JOBS says nothing."""
    text = tree.read(_PATH)
    if "MemAvailable" in text and _FUNCTION not in text:
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


# Simulated machines: GiB available, cores, MAX_JOBS, what ninja is told, what its file says. First
# a GB10 without weights, then one with 75 GB of them, machines with too little memory, a user's own
# number, and a system without /proc/meminfo.
_MACHINES = """\
116 20 -  12    name = fused_moe_120
45  20 -  4     name = fp4_gemm_cutlass_sm120
45  20 -  4     subninja /a/gemm_sm120/build.ninja
45  20 -  20    name = sampling; includes = -isystem /cutlass
14  8  -  4     name = sampling
15  8  -  1     name = fused_moe_120
4   8  -  1     name = fused_moe_120
45  20 6  6     name = fused_moe_120
0   20 -  none  name = fused_moe_120
""".splitlines()


def prove(case: kit.Case) -> str:
    """Run the release's own run_ninja on simulated machines, and read what ninja would be told."""
    questions = [partial(_told, case.patched, machine) for machine in _MACHINES]
    questions.append(partial(_told, case.stock, _MACHINES[0]))
    *answers, before = kit.ask(case.patched, questions, str)

    expected = [machine.split()[3] for machine in _MACHINES]
    if answers != expected:
        raise kit.ProofError(
            f"{_PATH}: ninja would be told -j {answers}, expected {expected}",
            why="the function was edited by hand, or upstream rewrote it",
        )
    return (
        f"ninja is told -j {answers[0]} for CUTLASS in 116 GiB, -j 4 in 45, -j 1 in 15; "
        f"before: {before}, so 22 on 20 cores"
    )


def _told(tree: kit.SourceTree, machine: str) -> str:
    """Return the number of jobs in the command that the release's code runs; "none" without."""
    available, cores, max_jobs, _jobs, modules = machine.split(maxsplit=4)
    memory = f"MemAvailable: {int(available) * 2**20} kB" if int(available) else ""
    words: list[str] = []
    names = {
        "os": SimpleNamespace(
            environ={"MAX_JOBS": max_jobs},
            sched_getaffinity=lambda _process: range(int(cores)),
        ),
        "Path": lambda _path: SimpleNamespace(read_text=lambda: memory),
        "subprocess": SimpleNamespace(
            run=lambda command, **_options: words.extend(command), STDOUT=None
        ),
    }

    run_ninja = kit.Code(tree, names).get(_PATH, _SCOPE)
    ninja_file = SimpleNamespace(
        read_text=lambda: modules.replace("; ", "\n"), resolve=str
    )
    run_ninja(kit.Anything(), ninja_file, verbose=True)
    return " ".join(words[7:]) or "none"


FIX = kit.Fix(
    title="FlashInfer starts as many compilers as memory holds",
    symptom="At the first start of a model the Spark hangs, or compilers end with code 137, while "
    "FlashInfer compiles fused_moe_120 or fp4_gemm_cutlass_sm120.",
    why="ninja starts a compiler for each core and two more: 22 on a GB10. One takes up to 8.4 GiB "
    "for CUTLASS, beside the weights in the same memory. With this fix they share what "
    "/proc/meminfo calls available, without 8 GiB: 8.5 GiB each for modules of CUTLASS, 1.5 for "
    "others, one at least; a line says if there is too little for one. MAX_JOBS still decides, and "
    "`patchkit env` sets it: leave it out where this fix is in.",
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
