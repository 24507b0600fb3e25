"""Marlin kernels as machine code for the device instead of PTX that it compiles at first use."""

from patchkit.recipes.vllm import kit

_PATH = "CMakeLists.txt"


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the Marlin lists that reach the device only through PTX."""
    lists = [
        entry
        for entry in kit.cuda13_lists(_PATH, tree.read(_PATH))
        if _is_marlin(entry, request)
    ]
    if not lists:
        raise kit.altered(f"{_PATH}: no Marlin arch list with PTX")

    arch = request.arch_list
    major = f"{request.target.major}."
    todo = [
        entry
        for entry in lists
        if not any(item.startswith(major) for item in entry.items)
    ]
    edits = [
        kit.add_list_item(entry.argument, arch, path=_PATH, note=f"build for {arch}")
        for entry in todo
    ]
    where = ",".join(str(entry.argument.line) for entry in todo or lists)
    return kit.found(
        edits,
        now=f"{_PATH}:{where}: Marlin lists end in PTX",
        done=f"{_PATH}:{where}: Marlin lists lead to {arch}",
    )


def _is_marlin(entry: kit.ArchList, request: kit.Request) -> bool:
    """Check whether a list of Marlin kernels ends in PTX, and the build is to reach it."""
    # Repacking and the like run once, at load time: a family build leaves them to PTX.
    if request.arch != "native" and "OTHER" in entry.variable:
        return False
    has_ptx = any(item.endswith("+PTX") for item in entry.items)
    return has_ptx and "MARLIN" in entry.variable


FIX = kit.Fix(
    title="Marlin kernels as SASS for the device",
    symptom="Garbled output from Marlin MoE models; minutes of PTX compilation at the first start.",
    why="The lists end in 8.0+PTX, so a GB10 compiles compute_80 PTX by itself. Before 0.23 that "
    "was reported to give wrong results in Marlin MoE; real machine code does not.",
    needs=(
        kit.required(">=0.11.1,<0.23", "Marlin MoE from PTX was reported wrong"),
        kit.recommended(
            ">=0.23", "repacking kernels still come from PTX", arch="native"
        ),
    ),
    upstream="0.23.0 added 12.0f to the kernel lists (#40923); repacking is PTX in every release",
    look=look,
    layer="build",
    examples=(
        kit.Example(
            "0.19.1",
            _PATH,
            'cuda_archs_loose_intersection(MARLIN_ARCHS "8.0+PTX" "${CUDA_ARCHS}")\n',
            'cuda_archs_loose_intersection(MARLIN_ARCHS "8.0+PTX;12.1a" "${CUDA_ARCHS}")\n',
        ),
    ),
)
