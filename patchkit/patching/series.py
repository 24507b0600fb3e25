"""Write a plan as a series of mails that ``git am`` takes: one patch per fix."""

from __future__ import annotations

import email.utils
import textwrap

from patchkit import __version__
from patchkit.edit.splice import git_diff
from patchkit.patching.plan import Plan, patch_steps
from patchkit.patching.recipe import load_recipe

_WIDTH = 72  # characters of a line, as is customary in git's commit messages
# git-format-patch(1): this fixed date tells git am that a patch begins, and no mail. git needs a
# date of the mail, too; a constant one makes the same plan give the same bytes.
_HEAD = f"""\
From {"0" * 40} Mon Sep 17 00:00:00 2001
From: patchkit <patchkit@localhost>
Date: {email.utils.formatdate(0)}
Subject: [PATCH {{number}}] {{title}}
MIME-Version: 1.0
Content-Type: text/plain; charset=UTF-8
Content-Transfer-Encoding: 8bit
"""


def patch_series(plan: Plan) -> dict[str, str]:
    """Return file name → mail, in order. Fixes without edits have none."""
    arch = load_recipe(plan.stock.project).build.value_for(plan.request)
    trailers = [
        f"Applies-To: {plan.stock.project} {plan.stock.version}",
        f"Target: {plan.request.target.name}, {plan.request.arch} {arch}",
    ]
    mails, steps = {}, list(patch_steps(plan.stock, plan.verdicts))
    for number, (verdict, texts) in enumerate(steps, start=1):
        fix = verdict.fix
        evidence = [f"Evidence: {e.claim} [{e.established}: {e.source}]" for e in fix.evidence]
        reasons = [f"Symptom: {fix.symptom}", f"Why: {fix.why}", f"Upstream: {fix.upstream}"]
        body = "\n\n".join(
            textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
            for text in [*reasons, *evidence]
        )
        head = _HEAD.format(number=f"{number}/{len(steps)}", title=fix.title)
        origin = f"Origin: patchkit {__version__}, fix {fix.id}"
        diff = "".join(git_diff(path, *pair) for path, pair in texts.items())
        mails[f"{number:04}-{fix.id.replace('_', '-')}.patch"] = "\n".join(
            [
                head,
                body,
                "",
                origin,
                *trailers,
                "---",
                "",
                f"{diff}-- ",
                f"patchkit {__version__}\n\n",
            ]
        )
    return mails
