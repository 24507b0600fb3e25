"""A part of `nox -s torture`: changes disturbed at every 128th system call, in every way.

At every 32nd in the matrix.
"""

import pytest

from e2e.torture.__main__ import NAMES, RELEASE, every, steps
from e2e.torture.supervisor import unavailable
from e2e.torture.users import users
from support.selection import WHOLE

pytestmark = [
    pytest.mark.releases,
    pytest.mark.skipif(
        bool(unavailable()), reason=f"nothing can be disturbed: {unavailable()}"
    ),
]
_STRIDE = 32 if WHOLE else 128


@pytest.fixture(scope="module")
def found(release, tmp_path_factory):
    with users(release(RELEASE), tmp_path_factory.mktemp("torture")) as all_of_them:
        yield {user.name: user for user in all_of_them}


@pytest.mark.parametrize(
    ("offset", "name"),
    [
        pytest.param(number, name, marks=[pytest.mark.e2e] if number else [], id=name)
        for number, name in enumerate(NAMES)
    ],
)
def test_the_old_state_or_the_new_one(found, offset, name):
    stride = min(_STRIDE, max(2, steps(found[name]) // 2))
    tried = list(every(found[name], stride, offset))
    assert len(tried) > 15
    assert [each for each in tried if each.wrong] == []
