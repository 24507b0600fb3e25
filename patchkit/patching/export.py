"""A plan as a series of mails that ``git am`` takes: one patch per fix."""

from __future__ import annotations

import email.utils
import textwrap
from pathlib import Path

from patchkit import __version__
from patchkit.edit.splice import git_diff
from patchkit.errors import StorageError, UsageError
from patchkit.patching.fix import Verdict
from patchkit.patching.plan import Plan, Texts
from patchkit.patching.recipe import load_recipe

# git needs a date; a constant one makes the same plan give the same bytes.
_DATE = email.utils.formatdate(0)
_AUTHOR = "patchkit <patchkit@localhost>"
_WIDTH = 72  # characters of a line, as is customary in git's commit messages


def series(plan: Plan) -> dict[str, str]:
    """Return file name → mail, in order. Fixes without edits have none."""
    steps = list(plan.steps())
    return {
        f"{number:04}-{verdict.fix.id.replace('_', '-')}.patch": _mail(
            plan, verdict, texts, f"{number}/{len(steps)}"
        )
        for number, (verdict, texts) in enumerate(steps, start=1)
    }


def mailbox(plan: Plan) -> str:
    """Return the series as one mailbox, which ``git am`` takes from standard input."""
    return "".join(series(plan).values())


def write_series(plan: Plan, folder: Path) -> list[Path]:
    """Write the series. Raises UsageError if the folder holds another one."""
    mails = series(plan)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # `git am *.patch` would take it along.
        if stale := sorted(p.name for p in folder.glob("*.patch") if p.name not in mails):
            raise UsageError(
                f"{folder}: holds {stale[0]}, which is not of this series",
                hint="name an empty folder",
            )
        for name, mail in mails.items():
            (folder / name).write_text(mail, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{error.filename}: {error.strerror}") from error
    return [folder / name for name in mails]


def _mail(plan: Plan, verdict: Verdict, texts: Texts, number: str) -> str:
    fix = verdict.fix
    arch = load_recipe(plan.stock.project).build.value_for(plan.request)
    evidence = [f"{e.claim} [{e.established}: {e.source}]" for e in fix.evidence]
    paragraphs = [
        f"Symptom: {fix.symptom}",
        f"Why: {fix.why}",
        f"Upstream: {fix.upstream}",
        *(f"Evidence: {line}" for line in evidence),
    ]
    body = "\n\n".join(
        textwrap.fill(paragraph, _WIDTH, break_long_words=False, break_on_hyphens=False)
        for paragraph in paragraphs
    )
    trailers = "\n".join(
        [
            f"Origin: patchkit {__version__}, fix {fix.id}",
            f"Applies-To: {plan.stock.project} {plan.stock.version}",
            f"Target: {plan.request.target.name}, {plan.request.arch} {arch}",
        ]
    )
    diff = "".join(git_diff(path, *pair) for path, pair in texts.items())
    return (
        # git-format-patch(1): this fixed date tells git am that a patch begins, and no mail.
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001\n"
        f"From: {_AUTHOR}\nDate: {_DATE}\n"
        f"Subject: [PATCH {number}] {fix.title}\n"
        "MIME-Version: 1.0\nContent-Type: text/plain; charset=UTF-8\n"
        "Content-Transfer-Encoding: 8bit\n\n"
        f"{body}\n\n{trailers}\n---\n\n{diff}-- \npatchkit {__version__}\n\n"
    )
