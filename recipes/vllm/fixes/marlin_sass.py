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
