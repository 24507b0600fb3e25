"""Ask this user's systemd, which a login without PAM does not find by itself."""

from __future__ import annotations

import os
from collections.abc import Sequence

from patchkit.process import Completed, attempt


def user_systemctl(*words: str, timeout: float = 60) -> Completed:
    """Run ``systemctl --user``; raises nothing."""
    return _as_user("systemctl", words, timeout)


def user_systemd_run(*words: str) -> Completed:
    """Run ``systemd-run --user``; raises nothing."""
    return _as_user("systemd-run", words, 60)


def _as_user(program: str, words: Sequence[str], timeout: float) -> Completed:
    runtime = {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}"}
    return attempt(program, "--user", *words, env=runtime | dict(os.environ), timeout=timeout)
