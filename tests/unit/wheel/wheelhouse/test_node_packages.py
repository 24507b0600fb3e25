"""Read what nodes have from what pip lists there."""

from __future__ import annotations

import pytest
from packaging.version import Version

from patchkit.errors import UsageError
from patchkit.wheel.file.name import wheel_name
from patchkit.wheel.wheelhouse.node import is_met, read_packages


@pytest.mark.parametrize(
    ("has", "locked", "met"),
    [
        ("2.11.0", "2.11.0", True),
        ("2.11", "2.11.0", True),
        ("2.11.0+cu130", "2.11.0", True),  # as pip: == without a label takes any
        ("2.11.0", "2.11.0+cu130", False),
        ("2.11.0a0+nv25.10", "2.11.0", False),
        ("2.11.0a0+nv25.10", "2.11.0a0", True),
        ("2.12.0", "2.11.0", False),
    ],
)
def test_what_pip_takes_for_satisfied(has, locked, met):
    name = wheel_name(f"torch-{locked}-py3-none-any.whl")
    assert is_met({"torch": Version(has)}, name) == met
    assert not is_met({"other": Version(has)}, name)


def test_what_all_nodes_have(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text(
        "# pip 23.2.1\nTyping_Extensions==4.12.2\n\ntorch==2.11.0  # NVIDIA's\nray==2.40\n"
    )
    other.write_text("typing-extensions==4.12.2\ntorch==2.11.0\nray==2.41\n")
    expected = {"torch": Version("2.11.0"), "typing-extensions": Version("4.12.2")}
    assert read_packages([one, other]) == expected
    assert read_packages([]) == {}


@pytest.mark.parametrize("line", ["torch", "torch>=2", "-e .", "a @ file:///a", "a==x", "\x1b[2J"])
def test_lines_that_name_no_version(line, tmp_path):
    listing = tmp_path / "node.txt"
    listing.write_text(f"ray==2.40\n{line}\n")
    with pytest.raises(UsageError, match=r"node\.txt:2: "):
        read_packages([listing])
