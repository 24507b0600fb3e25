"""nccl.pc with a prefix and a version instead of their placeholders."""

from patchkit.recipes.nccl import kit

_TEMPLATE = "src/nccl.pc.in"
_PLACEHOLDER = "${nccl:"
_VALUES = {
    "Prefix": "CMAKE_INSTALL_PREFIX",
    "Major": "NCCL_MAJOR",
    "Minor": "NCCL_MINOR",
    "Patch": "NCCL_PATCH",
}
_MARK = "# The template has make's placeholders, which configure_file leaves as they are.\n"
_USERS = "/opt/nccl"


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Look whether configure_file gets a template with make's placeholders, which it ignores."""
    text = tree.read(kit.SOURCE_FILE)
    done = f"{kit.SOURCE_FILE}: nccl.pc gets its prefix and its version"
    if _MARK in text:
        return kit.found((), now="", done=done)
    if _PLACEHOLDER not in tree.read(_TEMPLATE):
        return kit.upstream(f"{_TEMPLATE}: has CMake's placeholders")
    calls = [
        call
        for call in kit.commands(text, kit.SOURCE_FILE)
        if call.name == "configure_file" and call.arguments[0].value.endswith("/nccl.pc.in")
    ]
    if len(calls) != 1 or [a.value for a in calls[0].arguments[2:]] != ["@ONLY"]:
        raise kit.altered(
            f"{kit.SOURCE_FILE}: {len(calls)} calls configure nccl.pc.in, expected 1 with @ONLY"
        )
    call = calls[0]
    template, output = (argument.text for argument in call.arguments[:2])
    edit = kit.Edit(
        kit.SOURCE_FILE, call.start, call.stop, _after(template, output), "fill nccl.pc in"
    )
    now = f"{kit.SOURCE_FILE}:{call.line}: nccl.pc keeps {_PLACEHOLDER}Prefix}}"
    return kit.found([edit], now=now, done=done)


def _after(template: str, output: str) -> str:
    replaced = "".join(
        f'string(REPLACE "\\${{nccl:{name}}}" "${{{variable}}}" NCCL_PC "${{NCCL_PC}}")\n'
        for name, variable in _VALUES.items()
    )
    return (
        f"{_MARK}file(READ {template} NCCL_PC)\n{replaced}"
        f'file(WRITE {output} "${{NCCL_PC}}")\n'
        f"set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS {template})"
    )


def prove(case: kit.Case) -> str:
    """Run the build files in CMake: nccl.pc has the user's prefix and the release's version."""
    built = kit.configured(
        case.patched, case.request.target.cuda, [f"-DCMAKE_INSTALL_PREFIX={_USERS}"]
    )
    version = case.patched.version.base_version
    said = built.pkgconfig.splitlines()
    if f"prefix={_USERS}" not in said or f"Version: {version}" not in said:
        raise kit.ProofError(f"nccl.pc would say:\n{built.pkgconfig}")
    return f"nccl.pc says prefix={_USERS} and Version: {version}"


_ARGUMENTS = (
    "    ${CMAKE_CURRENT_SOURCE_DIR}/nccl.pc.in\n"
    "    ${CMAKE_BINARY_DIR}/lib/pkgconfig/nccl.pc\n"
    "    @ONLY\n"
)

FIX = kit.Fix(
    id="cmake_pkgconfig_prefix",
    title="nccl.pc from CMake has a prefix and a version",
    symptom="pkg-config --cflags nccl prints -I${nccl:Prefix}/include, or fails, after a CMake "
    "build.",
    why="nccl.pc.in has placeholders for the sed of the makefile. configure_file with @ONLY leaves "
    "${nccl:Prefix} and the version as they are.",
    needs=(kit.Need(">=2.28.7", kit.Severity.RECOMMENDED, "the file is of no use to pkg-config"),),
    upstream="fixed in upstream's repository after 2.30.7, with @NCCL_PREFIX@",
    evidence=(
        kit.Evidence("nccl.pc as CMake would write it", "patchkit's proof", "measured"),
        kit.Evidence("2.28.9 and 2.30.7 configured: prefix=${nccl:Prefix}", "cmake", "measured"),
        kit.Evidence(
            "src/nccl.pc.in with @NCCL_PREFIX@", "upstream's repository, 804c1f5a", "read"
        ),
    ),
    look=look,
    prove=prove,
    prove_from_stock=True,
    layer="build",
    majors=(9, 11, 12),
    examples=(
        kit.Example(
            version="2.29.7",
            path=kit.SOURCE_FILE,
            before=f"configure_file(\n{_ARGUMENTS})\n",
            after=_after(
                "${CMAKE_CURRENT_SOURCE_DIR}/nccl.pc.in",
                "${CMAKE_BINARY_DIR}/lib/pkgconfig/nccl.pc",
            )
            + "\n",
            beside={_TEMPLATE: "prefix=${nccl:Prefix}\n"},
        ),
    ),
)
