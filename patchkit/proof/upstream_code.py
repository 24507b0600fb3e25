"""Upstream's own Python, run piece by piece: no vLLM is imported, no torch, no CUDA.

A name that a piece uses is looked for where Python would look: among the definitions of its file,
then along its imports in the files of the same project. What is not there (torch, FlashInfer) is
stood in for by ``Anything``, which may be passed around but never decides.

Nothing is run in this process: ``questions.ask`` does it, in a child with a sandbox.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from types import CodeType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple, NoReturn  # noqa: F401  (where dataclasses looks for the name)

from patchkit.errors import ProofError
from patchkit.frozen import Fields, Texts
from patchkit.reading import parse_python
from patchkit.source.project import projects
from patchkit.source.tree import SourceTree

# Decorators that change how a function is called; others (torch.compile …) are left off.
_DECORATORS = {"classmethod", "staticmethod", "property", "abstractmethod", "dataclass"}

_MISSING = object()
_permitted = False

Import = tuple[str, str | None]  # the module's dotted name, and what is taken from it
_Decorated = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Definition = _Decorated | ast.Assign | ast.AnnAssign


@contextlib.contextmanager
def permitted() -> Iterator[None]:
    """Allow upstream's code to run in this process, in the block.

    Use it only in a sandboxed process, or for trusted code.
    """
    global _permitted
    before = _permitted
    _permitted = True
    try:
        yield
    finally:
        _permitted = before


def execute(code: CodeType, names: Fields) -> None:
    """Run a piece of upstream's code. Raises RuntimeError outside ``permitted``."""
    if not _permitted:
        raise RuntimeError(
            f"{code.co_filename}: is upstream's, and runs through questions.ask alone"
        )
    exec(code, names)  # noqa: S102


def place(error: BaseException) -> str:
    """Return ``FILE:LINE: `` of the piece of upstream's code that raised an error, or ``""``."""
    place = ""
    step = error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        # A piece has its path in the tree as its file.
        if not file.startswith(("/", "<")):
            place = f"{file}:{step.tb_lineno}: "
        step = step.tb_next
    return place


class Anything:
    """A stand-in for an object that a proof does not need: any attribute or call gives a stand-in.

    Two of one name are equal (``torch.bfloat16``). Asking whether one is true, or what is in it,
    raises ProofError, since that would be a decision.
    """

    def __init__(self, name: str = "a stand-in") -> None:
        self._name = name

    def __getattr__(self, name: str) -> Anything:
        # Protocols such as copy and pickle look for special methods: a stand-in has none.
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self._name}.{name}")

    def __call__(self, *_args: object, **_kwargs: object) -> Anything:
        return self

    __getitem__ = __or__ = __ror__ = __call__

    def __mro_entries__(self, _bases: tuple[object, ...]) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, _instance: object) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Anything) and self._name == other._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __bool__(self) -> NoReturn:
        raise ProofError(
            f"the code decides by {self._name}, which the proof does not know",
            why="upstream asks for something new here",
            hint="leave the fix out with --without, and report this release",
        )

    __iter__ = __bool__


class Code:
    """The Python code of one tree; ``names`` replace definitions and imports of these names."""

    def __init__(self, tree: SourceTree, names: Mapping[str, Any]) -> None:
        self._tree = tree
        self._modules: dict[str, _Module] = {}
        self.names = names

    def get(self, path: str, scope: str) -> Any:
        """Return ``name`` or ``Class.name`` of a file. Raises ProofError if it is not there."""
        first, *attributes = scope.split(".")
        module = self.module(path)
        value = _MISSING
        if module.has(first):
            value = module[first]

        for name in attributes:
            value = getattr(value, name, _MISSING)
        if value is _MISSING:
            raise ProofError(f"{path}: no {scope} to run")
        return value

    def has(self, path: str, name: str) -> bool:
        """Return whether a file is there and defines or imports ``name``."""
        return self._tree.exists(path) and self.module(path).has(name)

    def put(self, path: str, name: str, value: object) -> None:
        """Have the file at ``path``, and no other, use ``value`` by that name."""
        self.module(path)[name] = value

    def module(self, path: str) -> _Module:
        if path not in self._modules:
            text = self._tree.read(path)
            self._modules[path] = _Module(self, path, text)
        return self._modules[path]

    def imported(self, source: Import, name: str) -> object:
        """Return the object that an import binds to ``name``, or its replacement or stand-in."""
        if name in self.names:
            return self.names[name]

        module, attribute = source
        if module.split(".")[0] in sys.stdlib_module_names:
            real = importlib.import_module(module)
            if attribute is not None:
                return getattr(real, attribute)
            # `import a.b` binds a, `import a.b as c` binds b.
            return sys.modules.get(name, real)

        # As Python does: first a name within the module, then a module of that name.
        if attribute is not None:
            path = self._file(module)
            if path and self.module(path).has(attribute):
                return self.module(path)[attribute]
            module = f"{module}.{attribute}"
        if path := self._file(module):
            return _Attributes(self.module(path))
        return Anything(name)

    def _file(self, module: str) -> str:
        """Return the file of a module of the project; torch beside an installed vLLM is none."""
        if module.partition(".")[0] != projects()[self._tree.project].package:
            return ""

        stem = module.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if self._tree.exists(path):
                return path
        return ""


class _Attributes:
    """A module, seen from one that imports it."""

    def __init__(self, module: _Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        try:
            return self._module[name]
        except KeyError:
            raise AttributeError(name) from None


class _Module(Fields):
    """The globals of one file; each definition is run when it is first asked for."""

    def __init__(self, code: Code, path: str, text: str) -> None:
        functions = {**vars(builtins), "__import__": self._import_module}
        # The name is that of a module that exists, for dataclasses.
        super().__init__(__name__=__name__, __builtins__=functions)
        self._code = code
        self._path = path
        self.source = _source(path, text)

    def has(self, name: str) -> bool:
        source = self.source
        if name in source.definitions or name in source.imports:
            return True
        return name in self._code.names

    def __missing__(self, name: str) -> object:
        if name in self._code.names:
            return self._code.names[name]

        if name in self.source.definitions:
            for piece in self.source.pieces(name):
                self._fetch(piece.at_once)
                execute(piece.code, self)
            return self[name]

        if name not in self.source.imports:
            raise KeyError(name)
        source = self.source.imports[name]
        self[name] = self._code.imported(source, name)
        return self[name]

    def _fetch(self, names: Iterable[str]) -> None:
        """Keep names as globals: the look-ups of a class body do not come by ``__missing__``."""
        for name in filter(self.has, names):
            self[name] = self[name]

    def _import_module(
        self,
        module: str,
        _globals: object = None,
        _locals: object = None,
        names: Texts | None = (),
        level: int = 0,
    ) -> object:
        """Return what an import statement within a function binds."""
        dotted = _absolute_module(self._path, module, level)
        if dotted == "__future__" or not names:
            return self._code.imported((dotted, None), module)

        values = SimpleNamespace()
        for name in names:
            setattr(values, name, self._code.imported((dotted, name), name))
        return values


class _CompiledPiece(NamedTuple):
    """A statement, compiled, and the names that it looks up when it is run."""

    code: CodeType
    at_once: Texts


class _Source:
    """Definitions and imports of a file. Pieces are compiled once for all devices."""

    def __init__(self, path: str, text: str) -> None:
        self._path = path
        self._pieces: dict[str, list[_CompiledPiece]] = {}
        self.definitions: dict[str, list[Definition]] = {}
        self.imports: dict[str, Import] = {}
        self.body = parse_python(text).body

        for node in _module_statements(self.body):
            match node:
                case ast.ImportFrom() | ast.Import():
                    self.imports |= _imports_of(node, path)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self.definitions[node.name] = [node]
                case ast.Assign():
                    for target in node.targets:
                        self._add_assignment(target, node)
                case ast.AnnAssign():
                    self._add_assignment(node.target, node)

    def _add_assignment(
        self, target: ast.expr, node: ast.Assign | ast.AnnAssign
    ) -> None:
        match target:
            case ast.Name():
                self.definitions[target.id] = [node]
            case ast.Attribute(value=ast.Name(id=name)):
                # `Shape.ONE = …` below the class belongs to it.
                self.definitions.setdefault(name, []).append(node)

    def pieces(self, name: str) -> list[_CompiledPiece]:
        """Return the statements that define a name, compiled."""
        if name not in self._pieces:
            definitions = self.definitions[name]
            self._pieces[name] = list(map(self._compile, definitions))
        return self._pieces[name]

    def _compile(self, node: Definition) -> _CompiledPiece:
        for part in ast.walk(node):
            if isinstance(part, _Decorated):
                part.decorator_list = list(filter(_is_kept, part.decorator_list))

        # Annotations name types of torch and others, which are not there.
        module = ast.parse("from __future__ import annotations")
        module.body.append(node)
        code = compile(module, self._path, "exec")
        return _CompiledPiece(code, tuple(_names_at_once(code)))


def _imports_of(
    node: ast.Import | ast.ImportFrom,
    path: str,
) -> dict[str, Import]:
    """Return what an import in the file ``path`` binds, by name."""
    imports: dict[str, Import] = {}
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            module = _absolute_module(path, node.module or "", node.level)
            imports[alias.asname or alias.name] = (module, alias.name)
        else:
            name = alias.asname or alias.name.split(".")[0]
            imports[name] = (alias.name, None)
    return imports


def _is_kept(decorator: ast.expr) -> bool:
    """Return whether a decorator changes how a function is called."""
    name = ast.unparse(decorator).partition("(")[0]
    return name.rpartition(".")[2] in _DECORATORS


_source = lru_cache(maxsize=512)(_Source)


def _module_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those under ``if`` and ``try``."""
    for node in body:
        if isinstance(node, ast.If):
            # The body last, so that its definitions win over those of else and except.
            yield from _module_statements(node.orelse)
            yield from _module_statements(node.body)
        elif isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _module_statements(handler.body)
            yield from _module_statements(node.body)
        else:
            yield node


def _names_at_once(code: CodeType) -> Iterator[str]:
    """Yield names that running a definition looks up, not those that calling it does."""
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_NAME":
            yield step.argval
        # The body of a class is run at once; that of a function, which has fast locals, is not.
        body = step.argval
        if isinstance(body, CodeType) and not body.co_flags & inspect.CO_OPTIMIZED:
            yield from _names_at_once(body)


def _absolute_module(path: str, module: str, level: int) -> str:
    parts = path.split("/")[:-level] if level else []
    if module:
        parts.append(module)
    return ".".join(parts)
