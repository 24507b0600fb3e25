"""Find what a vLLM release refuses to capability 12.x, and where its own libraries say otherwise.

    nox -s gates -- X.Y.Z ...

A gate is an expression in vLLM's Python that takes 10.x and leaves out 12.x. Each is judged once,
by its function and expression, in recipes/vllm/gates.toml. The FlashInfer and the b12x that the
release pins are read for the capabilities that they name themselves. So only two things ask a
person: a gate that nobody judged, and one judged right whose library takes 12.x by now.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from patchkit.errors import SourceError
from patchkit.records import RECIPES, read_toml
from patchkit.source.fetch import fetch
from tools import run_program
from tools.decisions import Decision, show
from tools.index_entries import wheel_entries
from tools.seen import pristine

PLACE = RECIPES / "vllm" / "gates.toml"
# requirements/cuda.txt pins FlashInfer, an extra in setup.py b12x.
_PINS = re.compile(r"^[^#\n]*?\b(flashinfer-python|b12x)==([\w.]+)", re.MULTILINE)
_RANGES = ast.Lt | ast.LtE | ast.Gt | ast.GtE
_ASKS = {"is_device_capability_family", "is_device_capability"}
_NAMES = re.compile(r"major|capability|\bcap\b|\b_?cc\b")
_SM10, _SM12 = (re.compile(rf"sm_?1{family}x", re.IGNORECASE) for family in "02")
_LIBRARY = re.compile(r"compute_capability|supported_major_versions|is_sm12|OpMeta\(")
_MAJORS, _DECORATOR = "supported_major_versions", "supported_compute_capability"
_TIMES = re.compile(r" x(\d+)$")


@dataclass(frozen=True, slots=True)
class Gate:
    """``place`` is ``Class.function expression``, whatever line and file it stands on."""

    place: str
    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a person said of places that are alike; the head of the file describes the fields."""

    verdict: Literal["right", "lags", "tuning", "unmeasured"]
    places: tuple[str, ...]
    reason: str
    source: str
    library: tuple[str, ...] = ()


def find_gates(root: Path) -> Iterator[Gate]:
    """Yield the gates of a release's tree. Raises SourceError for Python that does not parse."""
    for path in sorted((root / "vllm").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "third_party" not in path.parts and (
            "capability" in text or _SM10.search(text)
        ):
            file = path.relative_to(root).as_posix()
            for scope, node in _closed(_parsed(text, file), path.stem):
                yield Gate(f"{scope} {_shown(node)}", file, node.lineno)


def _parsed(text: str, file: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise SourceError(f"{file}:{error.lineno}: {error.msg}") from None


def _closed(
    tree: ast.AST, scope: str, outer: bool = True
) -> Iterator[tuple[str, ast.expr]]:
    """Yield function and expression; a text counts where its function has no expression."""
    found, texts, inner = [], [], []
    nodes = list(ast.iter_child_nodes(tree))
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner.append(node)
            nodes += node.decorator_list
        elif (
            isinstance(node, ast.BoolOp)
            and isinstance(node.op, ast.Or)
            and any(
                _is_12x(each) for inside in ast.walk(node) for each in _asked(inside)
            )
        ):
            continue  # one of several ways is for 12.x
        elif _closes(node):
            found.append(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts += (
                [node]
                if _SM10.search(node.value) and not _SM12.search(node.value)
                else []
            )
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            nodes[:0] = ast.iter_child_nodes(node)
    yield from ((scope, node) for node in found or texts)
    for node in inner:
        yield from _closed(
            node, node.name if outer else f"{scope}.{node.name}", outer=False
        )


def _closes(node: ast.AST) -> bool:
    """Return whether an expression is true or false of 10.x alone, or ends below 12.x."""
    asked = _asked(node)
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], _RANGES):
        last = 120 if isinstance(node.ops[0], ast.Lt | ast.LtE) else 119
        return any(100 < each <= last for each in asked)
    only_asks = not isinstance(node, ast.Call) or _called(node) in _ASKS
    return (
        only_asks
        and any(100 <= each < 110 for each in asked)
        and not any(map(_is_12x, asked))
    )


def _is_12x(capability: int) -> bool:
    return 120 <= capability < 130


def _asked(node: ast.AST) -> list[int]:
    """Return the capabilities that an expression compares with the device's."""
    if isinstance(node, ast.Call) and "device_capability" in _called(node):
        return list(_capabilities(node.args[0])) if node.args else []
    if isinstance(node, ast.Compare):
        asked = [each for value in node.comparators for each in _capabilities(value)]
        return asked if asked and _NAMES.search(ast.unparse(node.left)) else []
    return []


def _called(call: ast.Call) -> str:
    """Return the last name of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _capabilities(node: ast.expr) -> Iterator[int]:
    """Yield 103 for 103, (10, 3) and DeviceCapability(10, 3), 100 for 10; of a list, each."""
    items = node.args if isinstance(node, ast.Call) else getattr(node, "elts", None)
    if items is None:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            yield node.value * 10 if node.value < 20 else node.value
        return
    major, minor = (
        [getattr(each, "value", None) for each in items] if len(items) == 2 else (0, 0)
    )
    if type(major) is type(minor) is int and minor < 10 <= major:
        yield major * 10 + minor
    else:
        for each in items:
            yield from _capabilities(each)


def _shown(node: ast.expr) -> str:
    """Return a gate's expression without what a release calls the platform; of a text, its gist."""
    if isinstance(node, ast.Constant):
        return "sm_10x"
    return re.sub(r"\b(?:\w+\.)+(?=is_device)", "", ast.unparse(node))


def read_library(wheel: Path) -> dict[str, bool]:
    """Return function → whether it takes 12.x, as ``flashinfer.mm``; of b12x ``b12x.group.op``."""
    found: dict[str, bool] = {}
    with zipfile.ZipFile(wheel) as archive:
        for path in archive.namelist():
            text = archive.read(path).decode() if path.endswith(".py") else ""
            if _LIBRARY.search(text):
                tree, package = _parsed(text, path), path.partition("/")[0]
                fixed = {
                    ast.unparse(node.targets[0]): node.value
                    for node in tree.body
                    if isinstance(node, ast.Assign)
                }
                for node in ast.walk(tree):
                    for name, takes in _stated(node, fixed):
                        found[f"{package}.{name}"] = (
                            found.get(f"{package}.{name}", False) or takes
                        )
    return found


def _stated(node: ast.AST, fixed: Mapping[str, ast.expr]) -> Iterator[tuple[str, bool]]:
    """Yield what a function, or an op's description, says of 12.x; nothing where it is silent."""
    if isinstance(node, ast.Call) and _called(node) == "OpMeta":
        fields = {word.arg: word.value for word in node.keywords}
        name = ".".join(ast.literal_eval(fields[key]) for key in ("group", "name"))
        yield name, "archs" not in fields or "sm121" in ast.unparse(fields["archs"])
    elif isinstance(node, ast.FunctionDef):
        inside = list(ast.walk(node))
        calls = [each for each in inside if isinstance(each, ast.Call)]
        lists = [w.value for call in calls for w in call.keywords if w.arg == _MAJORS]
        lists += [
            it for call in calls if _called(call) == _DECORATOR for it in call.args[:1]
        ]
        lists = [fixed.get(getattr(each, "id", ""), each) for each in lists]
        if lists or any(map(_closes, inside)):
            yield (
                node.name,
                any(_is_12x(each) for row in lists for each in _capabilities(row)),
            )
        elif any(_called(call).startswith("is_sm12") for call in calls):
            yield node.name, True


def read_libraries(root: Path) -> tuple[dict[str, str], dict[str, bool]]:
    """Return what a release pins, and what that says of 12.x. Raises StorageError."""
    texts = [
        (root / name).read_text("utf-8")
        for name in ("requirements/cuda.txt", "setup.py")
    ]
    pins = dict(_PINS.findall("\n".join(texts)))
    states: dict[str, bool] = {}
    for project, version in pins.items():
        (entry,) = wheel_entries(project, [version], ["any"])
        states |= read_library(fetch(project, version, {version: entry}))
    return pins, states


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Gates with their judgements, those among them that a library opens, and what to decide."""

    judged: Mapping[Gate, Judgement]
    opened: Mapping[Judgement, Sequence[Gate]]
    decisions: Sequence[Decision]


def judge(
    gates: Iterable[Gate], states: Mapping[str, bool], known: Iterable[Judgement] = ()
) -> Report:
    """Hold gates against what a person said of them, and against what the libraries say."""
    left, by_place = Counter[str](), dict[str, Judgement]()
    for judgement in known or read_toml(
        tuple[Judgement, ...], PLACE, SourceError, key="judgement"
    ):
        for text in judgement.places:
            place, times = _TIMES.sub("", text), _TIMES.search(text)
            left[place] += int(times[1]) if times else 1
            by_place[place] = judgement
    judged, opened, asks = dict[Gate, Judgement](), dict[Judgement, list[Gate]](), []
    for gate in gates:
        left[gate.place] -= 1
        if left[gate.place] < 0:
            asks.append((gate, "nobody has judged it"))
            continue
        judged[gate] = found = by_place[gate.place]
        names = [name for name in found.library if states.get(name)]
        if names and found.verdict == "right":
            asks.append((gate, f"judged right, but {', '.join(names)} takes 12.x"))
        if found.verdict in ("lags", "unmeasured") and (names or not found.library):
            opened.setdefault(found, []).append(gate)
    file = "recipes/vllm/gates.toml"
    decisions = [
        Decision(file=file, says=f"{g.file}:{g.line}: {w}", line=g.place)
        for g, w in asks
    ]
    return Report(judged=judged, opened=opened, decisions=decisions)


def main(versions: list[str]) -> int:
    """Print a release's gates that its libraries could open, and what a person has to judge."""
    if not versions:
        print(__doc__)
        return 2
    for version in versions:
        with tempfile.TemporaryDirectory() as folder:
            root = pristine(version, Path(folder))
            pins, states = read_libraries(root)
            found = judge(find_gates(root), states)
        counts = Counter(each.verdict for each in found.judged.values())
        counts["not judged"] = sum("nobody" in each.says for each in found.decisions)
        print(
            f"vLLM {version}: {counts.total()} gates leave out 12.x, by verdict: {dict(counts)}"
        )
        print(f"it pins {pins}; what these take, and the gates leave out:")
        for judgement, gates in sorted(
            found.opened.items(), key=lambda each: each[0].verdict
        ):
            print(f"{judgement.verdict}: {judgement.reason}")
            for gate in gates:
                print(f"    {gate.file}:{gate.line} {gate.place.partition(' ')[0]}")
        show(found.decisions)
    return 0


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
