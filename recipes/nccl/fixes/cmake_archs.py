"""What a plain CMake build builds for: the device, where upstream's list is never looked at."""

from patchkit.recipes.nccl import kit

_VARIABLE = "CMAKE_CUDA_ARCHITECTURES"
_BLOCK = """\
# project() would take nvcc's own default, and then the list below would not be looked at.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{{CUDAARCHS}})
    set(CMAKE_CUDA_ARCHITECTURES "{arch}")
endif()

"""
_USERS = "90-real"


def _arch(request: kit.Request) -> str:
    return f"{request.target.plain_arch(request.arch)}-real"


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Look whether anything chooses archs before project(), which else takes nvcc's default."""
    text = tree.read(kit.ROOT_FILE)
    calls = kit.commands(text, kit.ROOT_FILE)
    projects = [call for call in calls if call.name == "project"]
    if len(projects) != 1 or "CUDA" not in projects[0].values:
        raise kit.altered(
            f"{kit.ROOT_FILE}: {len(projects)} calls of project(), expected 1 with the language "
            "CUDA"
        )

    (project,) = projects
    block = _BLOCK.format(arch=_arch(request))
    done = f"{kit.ROOT_FILE}: a plain cmake builds {_arch(request)}"
    if text[: project.start].endswith(block):
        return kit.found((), now="", done=done)

    for call in calls:
        is_early = call.start < project.start
        if is_early and call.name == "set" and _VARIABLE in call.values[:1]:
            return kit.upstream(
                f"{kit.ROOT_FILE}:{call.line}: sets {_VARIABLE} before project()"
            )

    edit = kit.Edit(kit.ROOT_FILE, project.start, project.start, block, _arch(request))
    now = f"{kit.ROOT_FILE}:{project.line}: project() takes nvcc's default, before upstream's list"
    return kit.found([edit], now=now, done=done)


def prove(case: kit.Case) -> str:
    """Run the build files in CMake, with project() as it is: alone, and with the user's archs."""
    cuda = case.request.target.cuda
    before = kit.configured_archs(case.stock, cuda)
    after = kit.configured_archs(case.patched, cuda)
    users = kit.configured_archs(case.patched, cuda, [f"-D{_VARIABLE}={_USERS}"])
    if (after, users) != (_arch(case.request), _USERS):
        raise kit.ProofError(
            f"CMake would build {after or 'nothing'}, and {users} where the user asks for {_USERS}"
        )
    return f"CMake builds {after}, where it built {before}"


_PROJECT = "project(NCCL VERSION 2.29.7\n        LANGUAGES CUDA CXX C)\n"

FIX = kit.Fix(
    title="A plain CMake build has code for the device",
    symptom="cmake says `Using CUDA_ARCHITECTURES: 75`, and the library has no code for Blackwell, "
    "only sm_75 and PTX of it.",
    why="The list of archs stands behind project(), which has defined CMAKE_CUDA_ARCHITECTURES by "
    "then, as nvcc's own default, its oldest arch. -DCMAKE_CUDA_ARCHITECTURES and the variable "
    "CUDAARCHS still decide.",
    needs=(kit.required(">=2.28.7", "nothing is built for Blackwell"),),
    upstream="never up to 2.32.3; before 2.28.7 there is no CMake build",
    look=look,
    prove=prove,
    prove_from_stock=True,
    layer="build",
    majors=(9, 11, 12),
    examples=(
        kit.Example(
            "2.29.7",
            kit.ROOT_FILE,
            f"cmake_minimum_required(VERSION 3.25)\n\n{_PROJECT}",
            "cmake_minimum_required(VERSION 3.25)\n\n"
            f"{_BLOCK.format(arch='121-real')}{_PROJECT}",
        ),
    ),
)
