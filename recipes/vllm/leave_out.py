"""Optional extensions taken out of a tree, or taken as they are installed in upstream's wheel.

What is left out is neither fetched, nor built, nor asked for by setup.py. Three places know an
extension: ``CMakeLists.txt``, which includes its file; ``setup.py``, which asks for its targets and
copies what they leave; and, for flash-attention, the Python that imports it on the way of every
model.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from packaging.version import Version

from patchkit.edit.cmake import commands
from patchkit.edit.python import parsed, swap
from patchkit.edit.splice import Edit
from patchkit.edit.text import HINT, swap_text
from patchkit.errors import DriftError, UsageError
from patchkit.patching.fix import Request
from patchkit.patching.plan import with_edits
from patchkit.recipes.vllm.build import KnownSource, Wanted, known_externals
from patchkit.recipes.vllm.external import ROOT_FILE, for_cuda
from patchkit.source.tree import SourceTree

_SETUP = "setup.py"
_MARK = "left out by patchkit"
_TARGETS = frozenset({"define_extension_target", "add_custom_target"})
_EXTENSION = re.compile(r"vllm\.(?:vllm_flash_attn\.)?(\w+)")
_FLASH_ATTENTION = "vllm.vllm_flash_attn"
# Where releases keep it, newest first.
_FLASH_IMPORTS = (
    "vllm/v1/attention/backends/fa_utils.py",
    "vllm/attention/utils/fa_utils.py",
)

_INSTALLED = """\
# {option}, as it is installed in upstream's own wheel of this release
foreach(_target {targets})
  add_custom_target(${{_target}})
  install(DIRECTORY "$ENV{{{variable}}}/" DESTINATION . COMPONENT ${{_target}})
endforeach()"""

_GUARD = """\
try:  # flash-attention: {mark}
        {body}
    except ImportError:
        pass"""

# The copying beside an editable install expects what is not there any more.
_COPIED = """
print(
    f"Copying {self.build_lib}/vllm/third_party/triton_kernels "
    "to vllm/third_party/triton_kernels"
)
shutil.copytree(
    f"{self.build_lib}/vllm/third_party/triton_kernels",
    "vllm/third_party/triton_kernels",
    dirs_exist_ok=True,
)
"""
_COPIED_IF_THERE = """
if os.path.exists(f"{self.build_lib}/vllm/third_party/triton_kernels"):
    print(
        f"Copying {self.build_lib}/vllm/third_party/triton_kernels "
        "to vllm/third_party/triton_kernels"
    )
    shutil.copytree(
        f"{self.build_lib}/vllm/third_party/triton_kernels",
        "vllm/third_party/triton_kernels",
        dirs_exist_ok=True,
    )
"""

_COPYING = ("cmake_build_ext.run", _COPIED, _COPIED_IF_THERE)


def leave_out(tree: SourceTree, left: Iterable[KnownSource]) -> SourceTree:
    """Return the tree without these extensions, as an overlay; what is out already stays out.

    Raises UsageError for what cannot be left out, DriftError if the files are not as expected.
    """
    for source in left:
        check(source, tree.version)
        if not tree.exists(source.file):
            raise UsageError(
                f"--without {source.option}: vLLM {tree.version} has no {source.option}",
                hint="leave the option away for this release",
            )
        note, text, cmake = source.option, tree.read(_SETUP), tree.read(ROOT_FILE)
        included = f"include({source.file})", f"# {source.file}: {_MARK}"
        edits = [
            *swap_text(ROOT_FILE, cmake, *included, note=note),
            *_setup_edits(text, source.targets, note),
            *_guard_imports(tree, source),
        ]
        tree = with_edits(tree, tuple(edits))
        # Nothing may ask for what is left out any more.
        reached = [
            call.arguments[0].value
            for call in commands(tree.read(ROOT_FILE), ROOT_FILE)
            if call.name == "include" and call.arguments and for_cuda(call.block)
        ]
        if any(value.endswith(source.file) for value in reached):
            raise _still_named(ROOT_FILE, f"includes {source.file}")
        calls = commands(tree.read(source.file), source.file)
        built = {
            c.arguments[0].value for c in calls if c.name in _TARGETS and c.arguments
        }
        if extra := sorted(built - set(source.targets)):
            what = f"builds {extra[0]}, which is not known to belong to {source.option}"
            raise _still_named(source.file, what)
        if asked := sorted(asked_targets(tree) & set(source.targets)):
            raise _still_named(_SETUP, f"asks for {asked[0]}")
    return tree


def take_installed(tree: SourceTree, taken: Iterable[Wanted]) -> SourceTree:
    """Return the tree, as an overlay, with these sources installed from a folder each.

    vLLM's CMake has a file for each, which fetches, compiles and installs it. In the place of its
    inclusion come the same targets, which compile nothing and install the files of a folder; the
    release's own variable names that, in the environment. setup.py builds and installs these
    targets as ever. Raises DriftError if ``CMakeLists.txt`` does not include a source as expected.
    """
    for part in taken:
        known, text = part.known, tree.read(ROOT_FILE)
        ours = _INSTALLED.format(
            option=known.option,
            targets=" ".join(known.targets),
            variable=part.external.variable,
        )
        edits = swap_text(
            ROOT_FILE, text, f"include({known.file})", ours, note=known.option
        )
        tree = with_edits(tree, tuple(edits))
    return tree


def idle_sources(
    tree: SourceTree, request: Request, named: Collection[str] = ()
) -> dict[str, str]:
    """Return option → reason, of the optional sources that the build can do without at no cost.

    vLLM has no code for the device in them, or does not choose it there, or builds nothing of them.
    Options that are ``named`` are wanted nonetheless. What is not known to leave a tree cleanly,
    such as one that upstream changed, stays in.
    """
    asked, major, idle = asked_targets(tree), request.target.major, {}
    for known in known_externals():
        if not known.optional or known.option in named or not tree.exists(known.file):
            continue
        fixes = [
            unused.fix
            for unused in known.unused
            if major in unused.majors
            and (
                unused.fix in request.only
                if request.only
                else unused.fix not in request.skip
            )
        ]
        reason = (
            f"vLLM does not choose it there, by the fix {fixes[0]}" if fixes else ""
        )
        if not asked & set(known.targets):
            reason = "setup.py builds nothing of it"
        if not known.serves(major, tree.version):
            reason = f"of no use to {request.target.title}"
        with contextlib.suppress(DriftError, UsageError):
            if reason:
                leave_out(tree, [known])
                idle[known.option] = reason
    return idle


def only_extensions(tree: SourceTree, names: Collection[str]) -> SourceTree:
    """Return the tree with a setup.py that asks for these targets alone, for a build that tests.

    Raises UsageError for a target that it does not ask for.
    """
    text = tree.read(_SETUP)
    asked = {target for _statement, target in _asked_extensions(text)}
    if unknown := sorted(set(names) - asked):
        raise UsageError(
            f"vLLM {tree.version} has no extension {unknown[0]!r}",
            hint=f"there are {', '.join(sorted(asked))}",
        )
    return with_edits(tree, tuple(_setup_edits(text, asked - set(names), "extensions")))


def _setup_edits(text: str, targets: Collection[str], note: str) -> list[Edit]:
    """Replace statements that ask for a target by ``pass``: some are alone in their branch."""
    edits = [
        Edit(_SETUP, *_span(text, statement), f"pass  # {target}: {_MARK}", note)
        for statement, target in _asked_extensions(text)
        if target in targets
    ]
    copied = "triton_kernels" in targets
    return edits + (swap(_SETUP, text, *_COPYING, note=note) if copied else [])


def asked_targets(tree: SourceTree) -> set[str]:
    """Return the targets that setup.py names for an extension, in whatever form.

    CMake knows more of them, and builds those that it is asked for.
    """
    text = tree.read(_SETUP)
    calls = [
        node for node in ast.walk(parsed(_SETUP, text)) if isinstance(node, ast.Call)
    ]
    named = (
        str(part.value)
        for call in calls
        if ast.unparse(call.func) == "CMakeExtension"
        for part in ast.walk(call)
        if isinstance(part, ast.Constant)
    )
    return {value.rpartition(".")[2] for value in named}


def check(known: KnownSource, version: Version) -> None:
    """Raise UsageError if a release cannot be built, or cannot run, without it."""
    if not known.optional:
        raise UsageError(
            f"--without {known.option}: vLLM cannot be built without it",
            why=known.title,
            hint=f"name it with --source {known.option}=FOLDER, or in a mirror",
        )
    for refused in known.refused:
        if refused.covers(version):
            raise UsageError(
                f"--without {known.option}: vLLM {version} cannot run without it",
                why=refused.reason,
                hint="take a later release",
            )


def _asked_extensions(text: str) -> Iterator[tuple[ast.stmt, str]]:
    """Yield the statements ``ext_modules.append(CMakeExtension(name="vllm.TARGET", …))``."""
    for node in ast.walk(parsed(_SETUP, text)):
        match node:
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="ext_modules"), attr="append"),
                    args=[
                        ast.Call(func=ast.Name(id="CMakeExtension"), keywords=keywords)
                    ],
                )
            ):
                names = (k.value for k in keywords if k.arg == "name")
                for name in names:
                    if isinstance(name, ast.Constant) and (
                        match := _EXTENSION.fullmatch(str(name.value))
                    ):
                        yield node, match[1]


def _guard_imports(tree: SourceTree, left: KnownSource) -> Iterator[Edit]:
    """Let the module load without its names; backends that import them are passed over.

    vLLM asks every attention backend in turn and takes an ImportError for "not available".
    """
    if "_vllm_fa2_C" not in left.targets:
        return
    path = next((p for p in _FLASH_IMPORTS if tree.exists(p)), _FLASH_IMPORTS[0])
    text = tree.read(path)
    # Imports of flash-attention in the branch for CUDA, and whether they may fail.
    found = [
        (part, isinstance(statement, ast.Try))
        for node in parsed(path, text).body
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "current_platform.is_cuda()"
        for statement in node.body
        for part in (statement.body if isinstance(statement, ast.Try) else [statement])
        if isinstance(part, ast.ImportFrom) and part.module == _FLASH_ATTENTION
    ]
    if len(found) != 1:
        raise DriftError(
            f"{path}: {len(found)} imports of {_FLASH_ATTENTION} under is_cuda(), expected 1",
            why="upstream moved it, or the file was edited by hand",
            hint=HINT,
        )
    statement, guarded = found[0]
    if not guarded:
        start, stop = _span(text, statement)
        body = text[start:stop].replace("\n", "\n    ")
        guard = _GUARD.format(mark=_MARK, body=body)
        yield Edit(path, start, stop, guard, left.option)


def _still_named(path: str, problem: str) -> DriftError:
    return DriftError(
        f"{path}: {problem}",
        why="the release names the extension in a way that patchkit does not know",
        hint="build it, too: leave the option --without away",
    )


def _span(text: str, node: ast.stmt) -> tuple[int, int]:
    """Return where a statement stands, in code points."""
    lines: Sequence[str] = text.split("\n")
    assert node.end_lineno is not None
    assert node.end_col_offset is not None

    def offset(line: int, column: int) -> int:
        before = sum(len(line) + 1 for line in lines[: line - 1])
        return before + len(lines[line - 1].encode()[:column].decode())

    return offset(node.lineno, node.col_offset), offset(
        node.end_lineno, node.end_col_offset
    )
