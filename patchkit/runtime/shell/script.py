"""Read shell scripts: tree-sitter parses them, and what is sure is followed; nothing is run.

Only export, declare -x, a prefix of a command, env, -e of containers and what stands behind set -a
make an environment. Branches are read one by one, functions once, where they are called first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from patchkit.runtime.files.collected import Collected
from patchkit.runtime.files.content import How
from patchkit.runtime.files.value import MappedText, Value, joined, known, split, unknown
from patchkit.runtime.shell.expansion import Expansions
from patchkit.runtime.shell.programs import Place, Programs, takes_script
from patchkit.runtime.shell.scope import Scope
from patchkit.runtime.shell.syntax import ARGUMENTS, commands_in, parse, pipeline, words_in

if TYPE_CHECKING:
    from tree_sitter import Node

FileReader = Callable[[str, Value, Place], None]
"""Read a text that a script writes to a file of this name."""

_DEEPEST = 60  # statements in statements
_MOST_TEXTS = 4  # texts for eval in texts for eval
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)\+?=")
_ARGUMENT = re.compile(r"\$\{?[@*\d]")
_OPTIONS = re.compile(r"\s*(?:-\S.*\s)?(?:-e|--env)\s", re.DOTALL)
_RUNS = re.compile(r"(?:ssh|eval|bash|sh|sudo|docker|podman|kubectl|env)$")
_NESTED = {
    "program",
    "compound_statement",
    "do_group",
    "negated_command",
    "pipeline",
    "command_substitution",
    "process_substitution",
    "variable_assignments",
    "ERROR",
}
_LOOPS = {"while_statement", "for_statement", "c_style_for_statement"}


def read_shell(
    text: Value,
    place: Place,
    found: Collected,
    *,
    files: FileReader | None = None,
    all_exported: bool = False,
    variables: Iterable[tuple[str, Value]] = (),
) -> None:
    """Add what a script says; ``variables`` are those that it has to begin with.

    ``all_exported`` reads it as behind ``set -a``. ``files`` reads what the script writes to files;
    without it that is left out.
    """
    shell = _Shell(found, files)
    shell.all_exported = all_exported
    for name, value in variables:
        shell.expansions.scope.set(name, value)
    shell.read(text, place)
    shell.read_uncalled()


@dataclass(frozen=True, slots=True)
class _Function:
    body: Node
    source: MappedText
    place: Place
    runs_arguments: bool
    exports_arguments: bool


class _Shell:
    def __init__(self, found: Collected, files: FileReader | None) -> None:
        self.all_exported = False
        self.expansions = Expansions(found, self._statement)
        self._found, self._files = found, files
        self._programs = Programs(found, self._other_shell)
        self._functions: dict[str, _Function] = {}
        self._uncalled: dict[str, None] = {}
        self._exported: set[str] = set()
        self._source = MappedText(known("", 1))
        self._place = Place(line=1)
        self._depth = 0

    def read(self, text: Value, place: Place) -> None:
        """Read a text with the variables that are set now."""
        before = self._source, self._place
        self._source, self._place = MappedText(text), place
        try:
            self._statement(parse(self._source.data))
        finally:
            self._source, self._place = before

    def read_uncalled(self) -> None:
        """Read the functions that nothing in the script calls."""
        while self._uncalled:
            self._call(next(iter(self._uncalled)))

    def _line(self, node: Node) -> int:
        return self._source.line(node.start_byte)

    def _text(self, node: Node) -> str:
        return self._source.text(node.start_byte, node.end_byte)

    def _value(self, node: Node) -> Value:
        return self.expansions.value(node, self._source)

    def _words(self, node: Node) -> list[Value]:
        return self.expansions.words(node, self._source)

    @property
    def _scope(self) -> Scope:
        return self.expansions.scope

    def _other_shell(self, text: Value, place: Place) -> None:
        """Read what another shell runs: bash -c, ssh, and the like."""
        inherited = self._visible() if place.environment is None else place.environment.items()
        read_shell(text, place, self._found, files=self._files, variables=inherited)

    def _visible(self) -> Iterator[tuple[str, Value]]:
        """Yield the variables that a program sees."""
        for name in self._exported:
            if value := self._scope.get(name):
                yield name, value

    def _statement(self, node: Node) -> None:
        if self._depth > _DEEPEST:
            self._found.problem(self._line(node), "what is nested too deeply")
            return
        self._depth += 1
        try:
            self._read(node)
        finally:
            self._depth -= 1

    def _statements(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._statement(node)

    def _read(self, node: Node) -> None:
        kind = node.type
        if kind == "command":
            self._command(node, ())
        elif kind in _NESTED:
            self._statements(node.named_children)
        elif kind == "variable_assignment":
            self._assign(node, How.OWN)
        elif kind == "declaration_command":
            self._declare(node)
        elif kind == "unset_command":
            for child in node.named_children:
                self._scope.set(self._text(child), None)
        elif kind == "redirected_statement":
            self._redirected(node)
        elif kind == "list":
            self._list(node)
        elif kind == "function_definition":
            self._define(node)
        else:
            self._compound(node)

    def _compound(self, node: Node) -> None:
        """Read what may run, or not, or in a shell of its own."""
        if node.type == "subshell":
            outer = self._scope
            self._branch(node.named_children, node)
            self.expansions.scope = outer
        elif node.type == "if_statement":
            self._if(node)
        elif node.type == "case_statement":
            items = [each for each in node.named_children if each.type == "case_item"]
            branches = [self._branch(each.named_children, each) for each in items]
            self._scope.merge(branches, one_is_taken=False)
        elif node.type in _LOOPS:
            name = node.child_by_field_name("variable")
            if name:
                text = self._text(name)
                self._scope.set(text, unknown(f"${text}", self._line(name), "a loop sets it"))
            # The condition runs as well, and commands among the values.
            branch = self._branch(node.named_children, node)
            self._scope.merge([branch], one_is_taken=False)

    def _branch(self, nodes: Iterable[Node], at: Node) -> Scope:
        """Read statements as a block, and return what they set; nothing of it is merged yet."""
        before, place = self._scope, self._place
        branch = self.expansions.scope = Scope(before)
        self._place = self._programs.own_block(place, self._line(at))
        try:
            self._statements(nodes)
        finally:
            self.expansions.scope, self._place = before, place
        return branch

    def _if(self, node: Node) -> None:
        branches, has_else = [], False
        # Conditions are commands as well: `if ! ray start …; then`.
        for clause in (node, *node.named_children):
            if clause is not node and clause.type not in ("elif_clause", "else_clause"):
                continue
            has_else = has_else or clause.type == "else_clause"
            then: list[Node] = []
            is_condition = clause.type != "else_clause"
            for child in clause.children:
                if child.type == "then":
                    is_condition = False
                elif child.type in ("elif_clause", "else_clause") or not child.is_named:
                    continue
                elif is_condition:
                    self._statement(child)
                else:
                    then.append(child)
            branches.append(self._branch(then, clause))
        self._scope.merge(branches, one_is_taken=has_else)

    def _list(self, node: Node) -> None:
        """Read a && b || c; the chain leans to the left, however long it is."""
        operands = []
        while node.type == "list" and node.named_child_count > 1:
            operands.append(node.named_children[-1])
            node = node.named_children[0]
        self._statement(node)
        is_test = node.type == "test_command" or self._text(node).startswith(("[", "test "))
        for operand in reversed(operands):
            branch = self._branch([operand], operand) if is_test else self._inline(operand)
            self._scope.merge([branch], one_is_taken=False)

    def _inline(self, node: Node) -> Scope:
        before = self._scope
        branch = self.expansions.scope = Scope(before)
        try:
            self._statement(node)
        finally:
            self.expansions.scope = before
        return branch

    def _assign(self, node: Node, how: How) -> None:
        target, value_node = node.child_by_field_name("name"), node.child_by_field_name("value")
        if target is None or target.type != "variable_name":
            return
        name, line = self._text(target), self._line(target)
        value = self._value(value_node) if value_node else known("", line)
        if any(child.type == "+=" for child in node.children):
            whole = self._scope.append(name, value)
            # Of an array only what is new: the rest was noted before.
            value = value if value.items is not None else whole
        else:
            self._scope.set(name, value)
        self._note(name, value, line, how)

    def _note(self, name: str, value: Value, line: int, how: How) -> None:
        """Add a variable to the environment, or to what is the script's own."""
        if value.items is not None:
            self._programs.options(name, value.items, self._place)
            self._found.fragment(value.items)
            return
        if self._found.may_keep and _OPTIONS.match(
            value.text
        ):  # a text that keeps options for docker
            self._programs.options(name, list(split([(value, True)])), self._place)
        if how is How.EXPORT:
            self._exported.add(name)
        if how is How.EXPORT or self.all_exported or name in self._exported:
            self._found.set(name, value, line, How.EXPORT, self._place.block)
        else:
            self._found.keep(name, value, line, self._place.block)

    def _declare(self, node: Node) -> None:
        keyword = node.children[0].type
        options = [self._text(each) for each in node.named_children if each.type == "word"]
        switches = "".join(each for each in options if each.startswith("-"))
        if "f" in switches or "n" in switches.replace("-nameref", ""):
            return
        how = How.EXPORT if keyword == "export" or "x" in switches else How.OWN
        for child in node.named_children:
            if keyword in ("local", "declare", "typeset") and "g" not in switches:
                name = child.child_by_field_name("name") or child
                self._scope.local.add(self._text(name))
            if child.type == "variable_assignment":
                self._assign(child, how)
            elif how is How.EXPORT and child.type in ("variable_name", *ARGUMENTS):
                self._export(child)

    def _export(self, node: Node) -> None:
        """Read ``export NAME`` and ``export "NAME=$value"``."""
        for word in (
            [known(self._text(node), 0)] if node.type == "variable_name" else self._words(node)
        ):
            line = self._line(node)
            if match := _ASSIGNED.match(word.text):
                value = word.cut(match.end())
                self._scope.set(match["name"], value)
                self._note(match["name"], value, line, How.EXPORT)
            elif not word.why and word.text.isidentifier():
                if before := self._scope.get(word.text):
                    self._note(word.text, before, before.line or line, How.EXPORT)
                else:
                    self._exported.add(word.text)
                    self._found.pass_on(word.text, line, How.EXPORT, self._place.block)

    def _define(self, node: Node) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name and body:
            text = self._text(name)
            place = self._programs.own_block(self._place, self._line(node))
            runs = any(self._runs_arguments(each) for each in commands_in(body))
            declarations = commands_in(body, "declaration_command")
            exports = any(map(self._exports_arguments, declarations))
            self._functions[text] = _Function(body, self._source, place, runs, exports)
            self._uncalled[text] = None

    def _runs_arguments(self, command: Node) -> bool:
        """Return whether a command of a function runs what the function is given."""
        name = command.child_by_field_name("name")
        text = self._text(name) if name else ""
        rest = self._text(command)[len(text) :]
        return bool(
            _ARGUMENT.match(text.strip('"')) or (_RUNS.search(text) and _ARGUMENT.search(rest))
        )

    def _exports_arguments(self, declaration: Node) -> bool:
        """Return whether a declaration exports names that are not written there."""
        texts = [self._text(each) for each in declaration.named_children]
        switches = "".join(each for each in texts if each.startswith("-"))
        is_export = declaration.children[0].type == "export" or "x" in switches
        return is_export and any(each.startswith(("$", '"$')) for each in texts)

    def _export_arguments(self, words: Sequence[Value]) -> None:
        """Read what a function of the script exports: NAME=VALUE, or NAME and VALUE."""
        match = _ASSIGNED.match(words[0].text) if words else None
        if match:
            name, value = match["name"], words[0].cut(match.end())
        elif len(words) == 2 and not words[0].why and words[0].text.isidentifier():
            name, value = words[0].text, words[1]
        else:
            return
        self._scope.set(name, value)
        self._note(name, value, words[0].line, How.EXPORT)

    def _call(self, name: str, arguments: Sequence[Value] = ()) -> None:
        function = self._functions[name]
        if function.exports_arguments:
            self._export_arguments(arguments)
        if name not in self._uncalled:
            return
        del self._uncalled[name]
        outer, source, place = self._scope, self._source, self._place
        inner = self.expansions.scope = Scope(outer)
        self._source, self._place = function.source, function.place
        try:
            self._statement(function.body)
        finally:
            self.expansions.scope, self._source, self._place = outer, source, place
        outer.leave(inner)

    def _command(self, node: Node, documents: Sequence[Value]) -> list[Value]:
        """Read a command, and return its words; ``documents`` are what it gets on its input."""
        prefixes = [each for each in node.named_children if each.type == "variable_assignment"]
        words = [word for each in words_in(node) for word in self._words(each)]
        place = replace(self._place, line=self._line(node))
        if prefixes:
            place = self._programs.own_block(place, place.line)
        for each in prefixes:
            name, value = each.child_by_field_name("name"), each.child_by_field_name("value")
            if name:
                text = self._value(value) if value else known("", self._line(name))
                self._found.set(self._text(name), text, self._line(name), How.PREFIX, place.block)
        if words:
            self._run(words, place, documents)
        return words

    def _run(self, words: Sequence[Value], place: Place, documents: Sequence[Value]) -> None:
        name = words[0].text
        texts = [each.text for each in words]
        if name in self._functions:
            self._call(name, words[1:])
        elif name == "set":
            self._set(texts)
        elif name == "eval" and place.depth < _MOST_TEXTS:
            self.read(joined(words[1:], " "), replace(place, depth=place.depth + 1))
        elif name == "printf":
            self._programs.printed(words, place)
        elif name in ("read", "mapfile", "readarray", "getopts"):
            for text in texts[1:]:
                self._scope.set(text, unknown(f"${text}", place.line, "it is read from elsewhere"))
        runners = [each for each, function in self._functions.items() if function.runs_arguments]
        if name not in self._functions or name in runners:
            self._programs.run(words, place, runners)
        if documents and takes_script(texts):
            for document in documents:
                inside = self._programs.own_block(place, document.line)
                self._other_shell(document, replace(inside, depth=place.depth + 1))

    def _set(self, texts: Sequence[str]) -> None:
        """Read `set -a`, `set -o allexport` and their ends."""
        for before, text in pairwise(texts):
            named = before[1:] == "o" and text == "allexport"
            sign = before[0] if named else text[:1]
            if sign in ("-", "+") and (named or re.fullmatch(r"[-+][b-zA-Z]*a[a-zA-Z]*", text)):
                self.all_exported = sign == "-"

    def _redirected(self, node: Node) -> None:
        """Read a command with redirections: what it writes, and what it is given to run."""
        redirects: list[Node] = []
        documents: list[Value] = []
        for redirect in node.children_by_field_name("redirect"):
            if redirect.type == "heredoc_redirect":
                documents += filter(None, [self._document(redirect)])
                # What stands behind <<EOF in its line: a file, a pipe, further commands.
                redirects += [
                    each for each in redirect.named_children if each.type != "heredoc_body"
                ]
            else:
                redirects.append(redirect)
        targets = [self._target(each) for each in redirects if each.type == "file_redirect"]
        body = node.child_by_field_name("body")
        behind = [each for each in redirects if each.type in ("pipeline", "command", "list")]
        spoken: list[Value] = []
        for command in (each for statement in [body, *behind] for each in pipeline(statement)):
            if command.type != "command":
                self._statement(command)
                continue
            words = self._command(command, documents)
            texts = [each.text for each in words]
            if texts[:1] == ["echo"]:
                said = [each for each in words[1:] if not each.text.startswith("-")]
                spoken.append(joined(said, " "))
            if "tee" in texts[:3]:
                targets += [each for each in texts if not each.startswith("-")][-1:]
        self._write(targets, documents or spoken)

    def _write(self, targets: Sequence[str], texts: Sequence[Value]) -> None:
        """Read what a script writes to a file."""
        target = next((each for each in targets if each and not each.startswith("/dev/")), "")
        if not target or self._files is None:
            return
        for text in texts:
            place = self._programs.own_block(self._place, text.line)
            self._files(target, text, replace(place, depth=place.depth + 1))

    def _document(self, redirect: Node) -> Value | None:
        start = next((each for each in redirect.children if each.type == "heredoc_start"), None)
        body = next((each for each in redirect.children if each.type == "heredoc_body"), None)
        if start is None or body is None:
            return None
        plain = bool(re.search(r"['\"\\]", self._text(start)))
        tabs = any(each.type == "<<-" for each in redirect.children)
        return self.expansions.document(body, self._source, plain=plain, tabs=tabs)

    def _target(self, redirect: Node) -> str:
        """Return the file that a command writes, as far as it is known."""
        if not any(each.type in (">", ">>", "&>", "&>>", ">|") for each in redirect.children):
            return ""
        destination = redirect.child_by_field_name("destination")
        return self._value(destination).text if destination else ""
