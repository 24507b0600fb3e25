"""Leave optional extensions out of a tree, or install their files from upstream's own wheel.

An extension that is left out is neither fetched nor built, and setup.py does not ask for it. Three
places name an extension: ``CMakeLists.txt``, which includes its CMake file; ``setup.py``, which
asks for its targets and copies their files; and, for flash-attention, a Python module that imports
it and that every model needs.
"""

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from packaging.version import Version

from patchkit.edit.cmake import commands
from patchkit.edit.python import parsed, span_of, swap
from patchkit.edit.splice import Edit, Edits
from patchkit.edit.text import HINT, swap_text
from patchkit.errors import DriftError, UsageError
from patchkit.frozen import Values
from patchkit.patching.fix import Request
from patchkit.patching.plan import with_edits
from patchkit.recipes.vllm.attention import DECIDING, FA2
from patchkit.recipes.vllm.build import KnownSource, Wanted, known_externals
from patchkit.recipes.vllm.external import ROOT_FILE, for_cuda
from patchkit.source.tree import SourceTree, first_existing

_SETUP = "setup.py"
_MARK = "left out by patchkit"
_TARGETS = frozenset({"define_extension_target", "add_custom_target"})
# As ast.unparse writes the statement of setup.py that asks for a target.
_ASKED = (
    r"ext_modules\.append\(CMakeExtension\("
    r"name='vllm\.(?:vllm_flash_attn\.)?(\w+)'(?:, .*)?\)\)"
)
_FLASH_ATTENTION = "vllm.vllm_flash_attn"

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

# For an editable install, setup.py copies the files of triton_kernels. They are missing if
# triton_kernels is left out, so the second text copies them only if they are there.
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


def leave_out(tree: SourceTree, sources: Iterable[KnownSource]) -> SourceTree:
    """Return an overlay of the tree without some extensions, which may be left out already.

    Raises UsageError if an extension cannot be left out or the release has none of that name,
    DriftError if the files are not as expected.
    """
    for source in sources:
        check(source, tree.version)
        if not tree.exists(source.file):
            raise UsageError(
                f"--without {source.option}: vLLM {tree.version} has no {source.option}",
                hint="leave the option away for this release",
            )

        edits = _replace_include(tree, source, f"# {source.file}: {_MARK}")
        edits += _setup_edits(tree.read(_SETUP), source.targets, source.option)
        edits += _guard_imports(tree, source)
        tree = with_edits(tree, tuple(edits))
        _require_left_out(tree, source)
    return tree


def _replace_include(tree: SourceTree, source: KnownSource, text: str) -> Edits:
    return swap_text(
        ROOT_FILE,
        tree.read(ROOT_FILE),
        f"include({source.file})",
        text,
        note=source.option,
    )


def _require_left_out(tree: SourceTree, source: KnownSource) -> None:
    """Raise DriftError if a file still includes or asks for a source that was left out.

    Also raise it if the source's CMake file has a target that ``build.toml`` does not list.
    """
    for call in commands(tree.read(ROOT_FILE), ROOT_FILE):
        is_include = call.name == "include" and for_cuda(call.block)
        if is_include and "".join(call.values[:1]).endswith(source.file):
            raise _still_named(ROOT_FILE, f"includes {source.file}")

    targets = set(source.targets)
    for call in commands(tree.read(source.file), source.file):
        if call.name in _TARGETS and not targets.issuperset(call.values[:1]):
            extra = f"builds {call.values[0]}, which is not known to belong to"
            raise _still_named(source.file, f"{extra} {source.option}")

    still_asked = sorted(asked_targets(tree) & targets)
    if still_asked:
        raise _still_named(_SETUP, f"asks for {still_asked[0]}")


def take_installed(tree: SourceTree, parts: Iterable[Wanted]) -> SourceTree:
    """Return an overlay of the tree that installs each source from a folder, without compiling.

    vLLM has one CMake file per source, which fetches, compiles and installs the source. The
    ``include`` of this file is replaced by targets of the same names that only install the files
    of a folder. The environment variable of the source (``External.variable``) names the folder.
    setup.py stays as it is. Raises DriftError if ``CMakeLists.txt`` does not include a source as
    expected.
    """
    for part in parts:
        source = part.known
        installed = _INSTALLED.format(
            option=source.option,
            targets=" ".join(source.targets),
            variable=part.external.variable,
        )
        edits = _replace_include(tree, source, installed)
        tree = with_edits(tree, tuple(edits))
    return tree


def idle_sources(
    tree: SourceTree,
    request: Request,
    named: Collection[str],
) -> Values:
    """Return option → reason for each optional source that the device does not need.

    A source is not needed if it has no code for the device, if vLLM does not choose its code on
    the device, or if setup.py builds none of its targets. The result never has an option of
    ``named``, nor a source that ``leave_out`` refuses, for example since upstream changed its file.
    """
    targets = asked_targets(tree)
    idle = {}
    for source in known_externals():
        if source.option in named:
            continue

        reason = _idle_reason(source, tree, request, targets)
        # leave_out refuses what cannot be left out, and what the release does not have.
        with suppress(DriftError, UsageError):
            if reason:
                leave_out(tree, [source])
                idle[source.option] = reason
    return idle


def _idle_reason(
    source: KnownSource,
    tree: SourceTree,
    request: Request,
    targets: Collection[str],
) -> str:
    """Return the reason why a build for the request's device can leave a source out.

    Return "" if the source is needed. ``targets`` are the targets that setup.py asks for.
    """
    target = request.target
    if not source.serves(target.major, tree.version):
        return f"of no use to {target.title}"
    if not set(source.targets).intersection(targets):
        return "setup.py builds nothing of it"

    fix = source.unused.get(target.name)
    is_applied = fix in request.only if request.only else fix not in request.skip
    if fix and is_applied:
        return f"vLLM does not choose it there, by the fix {fix}"
    return ""


def only_extensions(tree: SourceTree, names: Collection[str]) -> SourceTree:
    """Return an overlay whose setup.py asks for the named targets only, to build a part in tests.

    Raises UsageError if setup.py asks for no target of one of the names.
    """
    text = tree.read(_SETUP)
    targets = {target for _statement, target in _asked_extensions(text)}
    if unknown := sorted(set(names) - targets):
        raise UsageError(
            f"vLLM {tree.version} has no extension {unknown[0]!r}",
            hint=f"there are {', '.join(sorted(targets))}",
        )
    edits = _setup_edits(text, targets - set(names), "extensions")
    return with_edits(tree, tuple(edits))


def _setup_edits(text: str, targets: Collection[str], note: str) -> Edits:
    """Return edits of setup.py that replace each statement that asks for a target by ``pass``.

    A statement is not just deleted, since it may be the only one of its branch.
    """
    edits = [
        Edit(
            _SETUP,
            *span_of(text, statement, statement),
            f"pass  # {target}: {_MARK}",
            note,
        )
        for statement, target in _asked_extensions(text)
        if target in targets
    ]
    if "triton_kernels" in targets:
        edits += swap(_SETUP, text, *_COPYING, note=note)
    return edits


def asked_targets(tree: SourceTree) -> set[str]:
    """Return every target that setup.py names within a call of ``CMakeExtension``.

    CMake has further targets; it builds only those that setup.py asks for.
    """
    targets = set()
    for node in ast.walk(parsed(_SETUP, tree.read(_SETUP))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "CMakeExtension":
            for part in ast.walk(node):
                if isinstance(part, ast.Constant):
                    targets.add(str(part.value).rpartition(".")[2])
    return targets


def check(source: KnownSource, version: Version) -> None:
    """Raise UsageError if the release cannot be built, or cannot run, without the source."""
    if not source.optional:
        raise UsageError(
            f"--without {source.option}: vLLM cannot be built without it",
            why=source.title,
            hint=f"name it with --source {source.option}=FOLDER, or in a mirror",
        )

    for refused in source.refused:
        if refused.covers(version):
            raise UsageError(
                f"--without {source.option}: vLLM {version} cannot run without it",
                why=refused.reason,
                hint="take a later release",
            )


def _asked_extensions(text: str) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each ``ext_modules.append(CMakeExtension(name="vllm.TARGET", …))`` and its TARGET."""
    for node in ast.walk(parsed(_SETUP, text)):
        if not isinstance(node, ast.Expr):
            continue
        if match := re.fullmatch(_ASKED, ast.unparse(node)):
            yield node, match[1]


def _guard_imports(tree: SourceTree, source: KnownSource) -> Iterator[Edit]:
    """Yield the edit that lets vLLM start without flash-attention; nothing for other sources.

    The edit puts the import of flash-attention into ``try … except ImportError``. A backend that
    needs the missing names then raises ImportError itself, and vLLM, which asks every attention
    backend in turn, takes this as "not available". Raises DriftError unless there is one import.
    """
    if FA2 not in source.targets:
        return

    path = first_existing(tree, DECIDING)  # this module imports flash-attention, too
    text = tree.read(path)
    imports = [*_flash_imports(parsed(path, text))]
    if len(imports) != 1:
        raise DriftError(
            f"{path}: {len(imports)} imports of {_FLASH_ATTENTION} under is_cuda(), expected 1",
            why="upstream moved it, or the file was edited by hand",
            hint=HINT,
        )

    statement, is_guarded = imports[0]
    if not is_guarded:
        start, stop = span_of(text, statement, statement)
        body = text[start:stop].replace("\n", "\n    ")
        guard = _GUARD.format(mark=_MARK, body=body)
        yield Edit(path, start, stop, guard, source.option)


def _flash_imports(module: ast.Module) -> Iterator[tuple[ast.ImportFrom, bool]]:
    """Yield each import of flash-attention in the branch for CUDA, and whether a ``try`` has it."""
    for node in module.body:
        if not isinstance(node, ast.If):
            continue
        if ast.unparse(node.test) != "current_platform.is_cuda()":
            continue

        for part in ast.walk(node):
            if isinstance(part, ast.ImportFrom) and part.module == _FLASH_ATTENTION:
                yield part, part not in node.body


def _still_named(path: str, problem: str) -> DriftError:
    return DriftError(
        f"{path}: {problem}",
        why="the release names the extension in a way that patchkit does not know",
        hint="build it, too: leave the option --without away",
    )
