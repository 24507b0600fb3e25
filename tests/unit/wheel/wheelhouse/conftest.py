"""Make a wheelhouse, and wheels to put into it."""

import pytest

from support.wheels import write_wheel


@pytest.fixture
def house(tmp_path):
    return tmp_path / "wheelhouse"


@pytest.fixture
def made(tmp_path):
    """A wheel outside of the wheelhouse: ``made("2.29.7")``."""
    return lambda version, **more: write_wheel(tmp_path / "made", version, **more)
