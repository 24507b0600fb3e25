"""Ask this user's systemd, which a login without PAM does not find by itself."""

from __future__ import annotations

import os

from patchkit.process import Completed, attempt


def user_systemctl(*words: str, timeout: float = 60) -> Completed:
    """Run ``systemctl --user``; raises nothing."""
    runtime = {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}"}
    return attempt("systemctl", "--user", *words, env=runtime | dict(os.environ), timeout=timeout)
