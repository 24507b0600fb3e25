"""Read YAML that others wrote: whatever is wrong with it is a YamlError, which names a line."""

import pytest

from patchkit.yaml_text import YamlError, read_nodes


@pytest.mark.parametrize("text", ["\ud800", "a: [", "*a", "&a [*a]"])
def test_a_text_that_is_none_is_an_error_of_yaml(text):
    with pytest.raises(YamlError):
        read_nodes(text)


def test_the_line_of_an_odd_character_is_told():
    text = "a: ééééééé\n" * 3 + "b: \x01\n" + "c: 1\n" * 20
    with pytest.raises(YamlError, match="odd characters") as error:
        read_nodes(text)
    assert error.value.line == 4


def nested(levels):
    """Return anchors that stand each in the next: nowhere is more than one collection open."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{number}: &a{number} [*a{number - 1}]" for number in range(1, levels)]
    return "\n".join(lines)


def test_aliases_count_as_what_they_stand_for():
    assert len(read_nodes(nested(63))[0].value) == 63
    with pytest.raises(YamlError, match="nested too deeply") as error:
        read_nodes(nested(200))
    assert error.value.line == 64
    assert read_nodes("[" * 64 + "]" * 64)
    with pytest.raises(YamlError, match="nested too deeply"):
        read_nodes("[" * 65 + "]" * 65)

    tenfold = "\n".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)
    )
    with pytest.raises(YamlError, match="too large"):
        read_nodes(f"a0: &a0 x\n{tenfold}")
