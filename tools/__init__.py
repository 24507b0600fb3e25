"""Maintain patchkit, by `python -m tools.NAME`: tables, pages, locks, proofs, pictures."""

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from patchkit.errors import PatchkitError


def run_program(main: Callable[..., int], *arguments: Any) -> NoReturn:
    """End with what ``main`` returns, or with its error's message and exit code."""
    try:
        sys.exit(main(*arguments))
    except PatchkitError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
