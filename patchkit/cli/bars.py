"""Draw progress bars with rich, on standard error."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from patchkit.quoting import visible


class _Console(Console):
    """A console that takes no text for markup, and escapes what a terminal would obey."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a text: every ``str`` comes through here."""
        return super().render_str(visible(text), **options)


def bars_of(counted: str) -> Progress:
    """Return bars of bytes, or of what ``counted`` names; without a terminal they draw nothing."""
    drawn = _Console(stderr=True)
    amounts = (
        (MofNCompleteColumn(), TextColumn(counted))
        if counted
        else (DownloadColumn(), TransferSpeedColumn())
    )
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *amounts,
        TimeRemainingColumn(),
        console=drawn,
        disable=not drawn.is_terminal,
        transient=True,
    )
