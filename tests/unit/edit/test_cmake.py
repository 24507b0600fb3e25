from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit.edit.cmake import (
    CMakeSyntaxError,
    Command,
    add_list_item,
    commands,
    list_items,
    remove_list_items,
    tokenize,
)
from patchkit.edit.splice import splice

SAMPLE = """\
# Top )
cmake_minimum_required(VERSION 3.26)

function(define target)
  if(NOT TARGET ${target})
    foreach (ARCH ${ARGN})
      if(ARCH STREQUAL "8.0"
         OR (ARCH STREQUAL "9.0a" AND NOT OLD))
        list(APPEND FLAGS "-gencode=${ARCH}") # trailing (
      else()
        Message(FATAL_ERROR [=[ no "arch" ]] ]=])
      endif()
    endforeach()
  endif()
endfunction()
#[[ a comment
    set(NOT_A_COMMAND 1)
]]
if(CUDA GREATER 13.0)
  set(ARCHS "8.0+PTX;12.0f")
elseif(CUDA GREATER 12.8)
  while(A)
    set(ARCHS "8.0+PTX;12.0a")
  endwhile()
else()
  set(ARCHS "8.0+PTX")
endif(CUDA)
define(foo
  8.0 "9.0a"
)
"""


def test_tokens():
    for text, expected in (
        (" \t", [("space", " \t")]),
        ("\ufeffa", [("space", "\ufeff"), ("identifier", "a")]),
        ("\n\r\n", [("newline", "\n"), ("newline", "\r\n")]),
        ("a\rb", [("identifier", "a"), ("space", "\r"), ("identifier", "b")]),
        ('# a [[ " (\r\n', [("comment", '# a [[ " ('), ("newline", "\r\n")]),
        ("#[[ ]=]\n]]a", [("comment", "#[[ ]=]\n]]"), ("identifier", "a")]),
        ("#[=[ ]]\n]=] ", [("comment", "#[=[ ]]\n]=]"), ("space", " ")]),
        ("(a)", [("open", "("), ("identifier", "a"), ("close", ")")]),
        ("a_1 8.0", [("identifier", "a_1"), ("space", " "), ("unquoted", "8.0")]),
        ("a[[b]]", [("unquoted", "a[[b]]")]),
        (r"\(\"\;\ \#", [("unquoted", r"\(\"\;\ \#")]),
        ('-Da="b c"d', [("unquoted", '-Da="b c"d')]),
        ('-Da="b\nc"', [("unquoted", "-Da="), ("quoted", '"b\nc"')]),
        ("$(MAKE)x${A}$", [("unquoted", "$(MAKE)x${A}$")]),
        ("$(;)", [("unquoted", "$"), ("open", "("), ("unquoted", ";"), ("close", ")")]),
        (r'"\"(#[["', [("quoted", r'"\"(#[["')]),
        ('"a\\\nb\\\\"', [("quoted", '"a\\\nb\\\\"')]),
        ('[[a"\n]]', [("bracket", '[[a"\n]]')]),
        ("[==[ ]] ]=] ]==]", [("bracket", "[==[ ]] ]=] ]==]")]),
    ):
        tokens = list(tokenize(text))
        assert [(token.lastgroup, token[0]) for token in tokens] == expected


def test_argument_values():
    for source, expected in (
        ("", []),
        (" A\r\n  B#c\n", ["A", "B"]),
        (
            "(A) AND ((B)OR C)",
            ["(", "A", ")", "AND", "(", "(", "B", ")", "OR", "C", ")"],
        ),
        ('"a b" a"b c"', ["a b", 'a"b c"']),
        (r'"\"\;${A}" \"\;', [r"\"\;${A}", r"\"\;"]),
        ("[[a]] [=[\n a]]\n]=] [[\r\n]]", ["a", " a]]\n", ""]),
        ("A #[[ B ) ]] C # D )\n", ["A", "C"]),
    ):
        (command,) = commands(f"set({source})")
        assert [argument.value for argument in command.arguments] == expected


def test_commands_know_the_branches_around_them() -> None:
    target = (("NOT", "TARGET", "${target}"), ())
    sm90 = ("(", "ARCH", "STREQUAL", "9.0a", "AND", "NOT", "OLD", ")")
    arch = ("ARCH", "STREQUAL", "8.0", "OR", *sm90)
    new, old = ("CUDA", "GREATER", "13.0"), ("CUDA", "GREATER", "12.8")
    assert [
        (command.line, command.name, conditions(command))
        for command in commands(SAMPLE)
    ] == [
        (2, "cmake_minimum_required", ()),
        (4, "function", ()),
        (5, "if", ()),
        (6, "foreach", (target,)),
        (7, "if", (target,)),
        (9, "list", (target, (arch, ()))),
        (10, "else", (target,)),
        (11, "message", (target, ((), (arch,)))),
        (12, "endif", (target,)),
        (13, "endforeach", (target,)),
        (14, "endif", ()),
        (15, "endfunction", ()),
        (19, "if", ()),
        (20, "set", ((new, ()),)),
        (21, "elseif", ()),
        (22, "while", ((old, (new,)),)),
        (23, "set", ((old, (new,)),)),
        (24, "endwhile", ((old, (new,)),)),
        (25, "else", ()),
        (26, "set", (((), (new, old)),)),
        (27, "endif", ()),
        (28, "define", ()),
    ]


def test_malformed_text_is_refused_with_its_line():
    for text, line, problem in (
        ('set(A)\nset(\n"b)\n', 3, "'\"' begins nothing"),
        ("set(A)\nset([=[ b ]])", 2, "begins nothing that ends"),
        ("\n#[[ b ]=]\n", 2, "begins nothing that ends"),
        ("set(A\\\nB)", 1, "begins nothing that ends"),
        ("set(A\n\0)", 2, r"'\\x00'"),
        ("\nset(A\nB", 2, "never closed"),
        ("set(A))", 1, r"found close '\)'"),
        ("\n(A)", 2, "expected a command name"),
        ('\n"set"(A)', 2, "expected a command name"),
        ("\nset", 2, "not followed by"),
        ("set(A) set(B)", 1, "expected a newline"),
        ("\nif(A)\nset(B)\n", 2, "if without its endif"),
        ("if(A)\nforeach(B)\nendif()\n", 3, "endif without its opening"),
        ("\nelse()", 2, "else without its if"),
        ("if(A)\nelse()\nelse()\nendif()", 3, "else without its if"),
        (
            "function(f)\nif(A)\nendfunction()\nendif()",
            3,
            "endfunction without its opening",
        ),
    ):
        with pytest.raises(
            CMakeSyntaxError, match=rf"^cmake/x\.cmake:{line}: .*{problem}"
        ):
            commands(text, "cmake/x.cmake")


def test_items_of_a_list_added_and_removed() -> None:
    for source, items, added, removed in (
        ('"8.0+PTX"', ["8.0+PTX"], '"8.0+PTX;12.0f"', '"8.0+PTX"'),
        ('"9.0a;"', ["9.0a"], '"9.0a;12.0f"', '"9.0a;"'),
        (r'"a\;b;${C}"', [r"a\;b", "${C}"], r'"a\;b;${C};12.0f"', r'"a\;b;${C}"'),
        (r'"a\;"', [r"a\;"], r'"a\;;12.0f"', r'"a\;"'),
        ('""', [], '"12.0f"', '""'),
        ("8.0;12.0f", ["8.0", "12.0f"], "8.0;12.0f;12.0f", "8.0"),
        ("${ARCHS}", ["${ARCHS}"], "${ARCHS};12.0f", "${ARCHS}"),
        ("[=[12.0f;8.0]=]", ["12.0f", "8.0"], "[=[12.0f;8.0;12.0f]=]", "[=[8.0]=]"),
        (
            '"8.0;12.0f;12.1f"',
            ["8.0", "12.0f", "12.1f"],
            '"8.0;12.0f;12.1f;12.0f"',
            '"8.0"',
        ),
        ('"12.0f"', ["12.0f"], '"12.0f;12.0f"', '""'),
        ('";8.0;;9.0;"', ["8.0", "9.0"], '";8.0;;9.0;12.0f"', '";8.0;;9.0;"'),
    ):
        text = f"set({source})"
        (argument,) = commands(text)[0].arguments
        assert list_items(argument) == items
        edit = add_list_item(argument, "12.0f", path="x", note="")
        assert splice(text, [edit]) == f"set({added})"
        edit = remove_list_items(argument, is_12, path="x", note="")
        assert splice(text, [edit]) == f"set({removed})"


def conditions(
    command: Command,
) -> tuple[tuple[tuple[str, ...], tuple[tuple[str, ...], ...]], ...]:
    return tuple((branch.condition, branch.excluded) for branch in command.block)


def is_12(item: str) -> bool:
    assert item, "empty items are not offered"
    return item.startswith("12.")


@settings(max_examples=1000, deadline=None)
@given(st.text() | st.text(st.sampled_from('aZ_0 ()[]="#\\\n\r\t$;{}\0\ufeff\x0cé')))
def test_any_text_is_refused_or_kept_whole(text: str) -> None:
    with suppress(CMakeSyntaxError):
        assert "".join(token[0] for token in tokenize(text)) == text
        commands(text)
