"""pip's settings: which package index, and how to reach it."""

from __future__ import annotations

import ast
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from patchkit.process import attempt

if TYPE_CHECKING:
    import requests  # imported where it is used: it takes a while

_SECTION = "global."


def pip_settings() -> dict[str, str]:
    """Return what pip is configured for: ``index-url`` and the like, {} if there is no pip.

    Environment variables (``PIP_INDEX_URL``) come before its files. As for pip, a setting that is
    empty is none, and one with several values separates them by white space.
    """
    values = defaultdict(set)
    for line in _pip_config("list").splitlines():
        name, _, value = line.partition("=")
        if name.startswith(_SECTION):
            # pip prints the repr of each value.
            values[name.removeprefix(_SECTION)].add(str(ast.literal_eval(value)))
    # "list" of newer pips has the values of all files, in an order that is not their precedence.
    found = {
        name: given.pop() if len(given) == 1 else _pip_config("get", f"{_SECTION}{name}").strip()
        for name, given in values.items()
    }
    for name, value in os.environ.items():
        if name.startswith("PIP_") and value:
            found[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return {name: value for name, value in found.items() if value}


def index_session(settings: Mapping[str, str]) -> requests.Session:
    """Return a session that reaches the files of pip's indexes as pip does."""
    import requests

    session = requests.Session()
    session.verify = settings.get("cert", True)
    session.cert = settings.get("client-cert")
    if proxy := settings.get("proxy"):
        session.proxies = {"http": proxy, "https": proxy}
    # The user and the password of each host that an index's URL names with them.
    passwords = {}
    # index-url last: of two with one host, the later one wins.
    for option in ("extra-index-url", "index-url"):
        for parts in map(urlsplit, settings.get(option, "").split()):
            if parts.username is not None:
                user, password = unquote(parts.username), unquote(parts.password or "")
                passwords[parts.hostname] = user, password

    def authenticate(request: requests.PreparedRequest) -> requests.PreparedRequest:
        known = passwords.get(urlsplit(request.url or "").hostname)
        return requests.auth.HTTPBasicAuth(*known)(request) if known else request

    if passwords:  # else netrc is asked
        session.auth = authenticate
    return session


def _pip_config(*arguments: str) -> str:
    done = attempt(sys.executable, "-m", "pip", "config", *arguments)
    return "" if done.trouble else done.output
