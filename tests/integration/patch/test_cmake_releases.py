"""The CMake lexer on everything that upstream wrote, with tree-sitter as the judge."""

import pytest
from tree_sitter_language_pack import get_parser

from patchkit.edit.cmake import commands, tokenize

PARSER = get_parser("cmake")
BLOCKS = {
    *("if", "elseif", "else", "endif", "foreach", "endforeach", "while", "endwhile"),
    *("function", "endfunction", "macro", "endmacro", "block", "endblock"),
}


@pytest.mark.releases
def test_every_cmake_file_survives_and_reads_as_tree_sitter_reads_it(version, release):
    root = release(version)
    paths = [*root.rglob("*.cmake"), *root.rglob("CMakeLists.txt")]
    assert len(paths) >= 6
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert "".join(token[0] for token in tokenize(text)) == text
        ours = [(c.name, c.line) for c in commands(text, str(path))]
        assert [pair for pair in ours if pair[0] not in BLOCKS] == _theirs(text), path


def _theirs(text):
    """(name, line) of every call that is not of a block, in order."""
    found, todo = [], [PARSER.parse(text.encode()).root_node]
    while todo:
        node = todo.pop()
        if node.type == "normal_command":
            name = node.children[0].text.decode().lower()
            found.append((name, node.start_point[0] + 1))
        todo.extend(reversed(node.children))
    return found
