"""Let rsync fail on this machine: the error names the cause, and a command that works here."""

import pytest

from patchkit.cluster.agent.group_script import QUESTIONS
from patchkit.cluster.ssh.node import copy_files
from patchkit.errors import HostError
from support import write_files
from support.needed import need


@pytest.mark.parametrize(
    ("there", "cause"),
    [
        ({"there": "a file"}, "mkdir"),
        ({"there/a.whl/other": "a folder in its way"}, "make way|delete"),
    ],
)
def test_a_copy_that_fails_names_its_cause(tmp_path, there, cause):
    need("rsync")
    write_files(tmp_path, {"here/a.whl": "a", **there})
    copying = copy_files(
        str(tmp_path / "here"), ["a.whl"], "localhost", str(tmp_path / "there")
    )
    with pytest.raises(HostError, match=cause) as caught:
        list(copying)
    assert "speedup" not in caught.value.what
    assert "`rsync -V`" in caught.value.hint


def test_the_same_question_has_the_same_answer():
    """A sampled answer would let two runs of doctor differ."""
    generating = [
        question for question in QUESTIONS.values() if "max_tokens" in question
    ]
    assert [question["temperature"] for question in generating] == [0, 0]
