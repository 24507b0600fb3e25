"""A local version, so that a patched build never looks like upstream's."""

import contextlib
import hashlib
import re
from types import SimpleNamespace

from packaging.version import InvalidVersion, Version

from patchkit.recipes.vllm import kit
from patchkit.recipes.vllm.build import read_needs

_PATH = "setup.py"
_SCOPE = "get_vllm_version"
_VARIABLE = "VLLM_VERSION_OVERRIDE"
_BEFORE = f'os.getenv("{_VARIABLE}")'
_LABELLED = re.compile(rf'os\.getenv\(\s*"{_VARIABLE}",\s*"([^"]+)"\s*\)')


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the default of VLLM_VERSION_OVERRIDE, which setup.py also hands to setuptools-scm."""
    text = tree.read(_PATH)
    tags = _tags(tree, request)
    present = _LABELLED.search(text)
    if present and not _is_own(present[1], tags):
        present = None
    if present and not set(tree.overlay) - {_PATH}:
        return kit.found((), now="", done=f"{_PATH}: the build is called {present[1]}")

    separator = "." if tree.version.local else "+"
    # Of all pending texts: the same fixes on the same release give the same label. The p keeps a
    # digest of digits alone from being read as a number, which would drop its zeros.
    pending = {**tree.overlay, _PATH: _LABELLED.sub(_BEFORE, text)}
    parts = (part for item in sorted(pending.items()) for part in item)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]
    label = f"{tree.version}{separator}{tags}p{digest}"

    before = present[0] if present else _BEFORE
    after = f'os.getenv("{_VARIABLE}", "{label}")'
    edits = []
    if before != after:
        edits = kit.swap(_PATH, text, _SCOPE, before, after, note=label)
    return kit.found(
        edits,
        now=f"{_PATH}: the build is called {tree.version}, as upstream's",
        done=f"{_PATH}: the build is called {label}",
    )


def _is_own(label: str, tags: str) -> bool:
    """Return whether a label is this target's; of any version: committing a patch changes git's."""
    return re.search(rf"[+.]{re.escape(tags)}p[0-9a-f]{{8}}$", label) is not None


def _tags(tree: kit.SourceTree, request: kit.Request) -> str:
    target = request.target.with_torch(read_needs(tree).torch)
    return f"{target.cuda_tag}.{target.name}."


def prove(case: kit.Case) -> str:
    """Run get_vllm_version without the variable: the label must come out, as a valid version."""
    environ: dict[str, str] = {}
    tags = _tags(case.patched, case.request)
    names: dict[str, object] = {
        "os": SimpleNamespace(environ=environ, getenv=environ.get),
        "get_version": lambda **_options: environ["SETUPTOOLS_SCM_PRETEND_VERSION"],
        "print": lambda _text: None,
        "VLLM_GIT_DESCRIBE_COMMAND": None,
    }
    code = kit.Code(case.patched, names)
    (label,) = kit.ask(case.patched, [lambda: code.get(_PATH, _SCOPE)()], object)
    with contextlib.suppress(InvalidVersion):
        if (
            isinstance(label, str)
            and str(Version(label)) == label
            and _is_own(label, tags)
        ):
            return f"the build is called {label}"
    raise kit.ProofError(f"{_PATH}: {_SCOPE} returns {label!r}")


FIX = kit.Fix(
    title="A version of its own for a patched build",
    symptom="pip and `vllm --version` cannot tell a patched build from upstream's.",
    why="From 0.20 on CUDA 13.0 is upstream's main CUDA, so a build gets no local version at all. "
    "VLLM_VERSION_OVERRIDE still wins when it is set.",
    needs=(kit.recommended(">=0.11.1", "a patched build looks like upstream's"),),
    upstream="never: the label is patchkit's own",
    look=look,
    prove=prove,
    last=True,
    layer="build",
    majors=(11, 12),
    examples=(
        kit.Example(
            "0.33.0",
            _PATH,
            f"def {_SCOPE}():\n    return {_BEFORE}\n",
            f"def {_SCOPE}():\n    return "
            f'os.getenv("{_VARIABLE}", "0.33.0+cu130.gb10.p8c1d0fb4")\n',
        ),
    ),
)
